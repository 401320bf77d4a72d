//! `coli run`: one generation.

use std::io::IsTerminal;
use std::time::Duration;

use container::{Config, Tokenizer};
use models::{Activity, Spent, Stage};
use numerics::NUMERICS_VERSION;
use runtime::machine::Machine;
use runtime::text::TextStream;
use runtime::{Engine, Generated, Generation, GenerationOptions, Phase};
use serde_json::json;

use crate::args::RunArgs;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{Outcome, input, interrupt, model, output, workers};

/// Bytes per token that no text reaches on average.
const TOKEN_BYTES_MAX: u64 = 64;

pub fn run(args: &RunArgs) -> Outcome {
    let sampler = model::sampler(&args.sampling)?;
    let config = Config::load(&model::dirs(&args.engine.model)?[0])?;
    let (tokenizer, text) = match &args.ids {
        Some(_) => (None, String::new()),
        None => {
            // Text far beyond the context is refused before a tokenizer sees it.
            let limit_bytes = (config.max_position as u64).saturating_mul(TOKEN_BYTES_MAX);
            let text = prompt_text(args, limit_bytes)?;
            (Some(model::tokenizer(&args.engine.model)?), text)
        }
    };
    let prompt = match (&args.ids, &tokenizer) {
        (Some(ids), _) => ids.clone(),
        (None, Some(tokenizer)) => prompt_ids(&config, tokenizer, &text)?,
        (None, None) => Vec::new(),
    };
    if prompt.is_empty() {
        return Err(Failure::usage("the prompt is empty; give some text or --ids"));
    }
    // What no context of this model could hold is refused before its weights are loaded.
    check_fits(prompt.len(), args.engine.ctx.unwrap_or(config.max_position))?;
    let model::Opened { engine, history, workers } = model::open(&args.engine)?;
    let mut session = engine.session()?;
    check_fits(prompt.len(), session.context())?;
    if sampler.temperature > 0.0 {
        note!("seed {}", sampler.seed);
    }
    let options = GenerationOptions {
        max_tokens: args.sampling.max_tokens,
        sampler,
        stop_ids: engine.config().stop_ids.clone(),
        fingerprint: args.fingerprint,
        profile: args.profile,
    };
    interrupt::listen();
    if !args.json && args.ids.is_none() && std::io::stdout().is_terminal() {
        // On a terminal the text reads from its beginning; into a pipe goes the continuation.
        say_part!("{text}");
    }
    let mut stream = Stream::new(tokenizer.as_ref(), !args.json);
    let mut progress = Progress::share("reading the prompt");
    let generated = Generation::new(&engine, options).run(&mut session, &prompt, &mut |phase| {
        match phase {
            Phase::Prefill(share) => progress.set_share(share),
            Phase::Token(token) => stream.push(token),
        }
        !interrupt::asked()
    });
    drop(progress);
    let text = stream.finish();
    let generated = generated?;
    history.turn_done(&engine);
    model::close(&engine)?;
    if args.json {
        let mut figures = json_figures(&engine, &generated, text, sampler);
        figures["cluster"] = workers::json(&workers);
        output::print_json(&figures);
    } else {
        if let Some(fingerprint) = &generated.fingerprint {
            note!("fingerprint {fingerprint}");
        }
        note!("{}", figures(&engine, &generated));
        workers::note(&workers);
        if let Some(spent) = &generated.spent {
            note!("{}", profile_table(spent));
        }
    }
    Ok(())
}

/// Refuses a prompt that does not fit, with both numbers.
fn check_fits(tokens: usize, context: usize) -> Result<(), Failure> {
    if tokens <= context {
        return Ok(());
    }
    Err(Failure::usage(format!(
        "the prompt has {tokens} tokens, the context holds {context}; shorten it or raise --ctx \
         (or --ram, which bounds it where --ctx is not given)"
    )))
}

fn prompt_text(args: &RunArgs, limit_bytes: u64) -> Result<String, Failure> {
    let from_stdin = || {
        input::read_text(std::io::stdin(), limit_bytes)
            .map_err(|what| Failure::usage(format!("the prompt on stdin: {what}")))
    };
    match args.prompt.as_deref() {
        Some("-") => from_stdin(),
        Some(text) if text.len() as u64 > limit_bytes => Err(Failure::usage(format!(
            "the prompt has {} bytes; no text of more than {limit_bytes} fits this model's context",
            text.len()
        ))),
        Some(text) => Ok(text.to_owned()),
        None if std::io::stdin().is_terminal() => {
            Err(Failure::usage("give a prompt, such as coli run \"Once upon a time\""))
        }
        None => Err(Failure::usage("give a prompt, `-` to read it from stdin, or --ids")),
    }
}

/// Ids of a text to continue, after the family's prefix.
fn prompt_ids(config: &Config, tokenizer: &Tokenizer, text: &str) -> Result<Vec<u32>, Failure> {
    if text.is_empty() {
        return Ok(Vec::new());
    }
    let ids = tokenizer.encode(text, false)?;
    let prefix = model::family_prefix(config.family, tokenizer);
    let mut prompt = lab::score::missing_prefix(&prefix, &ids);
    prompt.extend(ids);
    Ok(prompt)
}

/// Text or ids, printed as they come.
pub struct Stream<'a> {
    tokenizer: Option<&'a Tokenizer>,
    print: bool,
    bytes: TextStream,
    /// Ids whose tokens have no bytes of their own; decoded together.
    ids: Vec<u32>,
    text: String,
}

impl<'a> Stream<'a> {
    /// A stream; without a tokenizer ids are printed.
    pub fn new(tokenizer: Option<&'a Tokenizer>, print: bool) -> Stream<'a> {
        Stream {
            tokenizer,
            print,
            bytes: TextStream::default(),
            ids: Vec::new(),
            text: String::new(),
        }
    }

    /// Adds a token.
    pub fn push(&mut self, token: u32) {
        self.ids.push(token);
        let piece = match self.tokenizer {
            None if self.ids.len() == 1 => token.to_string(),
            None => format!(",{token}"),
            Some(tokenizer) => match tokenizer.token_bytes(token) {
                Some(bytes) => self.bytes.push(&bytes),
                // Tokens of other tokenizers have no bytes of their own: what is new is what the
                // whole decodes to beyond what was shown, once it ends in a whole character.
                None => match tokenizer.decode(&self.ids, false) {
                    Ok(all) if !all.ends_with(char::REPLACEMENT_CHARACTER) => {
                        all.get(self.text.len()..).unwrap_or_default().to_owned()
                    }
                    _ => String::new(),
                },
            },
        };
        self.show(&piece);
    }

    fn show(&mut self, piece: &str) {
        self.text.push_str(piece);
        if self.print {
            say_part!("{piece}");
        }
    }

    /// Ends the stream and returns everything shown.
    pub fn finish(mut self) -> String {
        let rest = self.bytes.finish();
        self.show(&rest);
        if self.print && !self.text.is_empty() && !self.text.ends_with('\n') {
            say!("");
        }
        self.text
    }
}

fn hit_rate(engine: &Engine) -> Option<f64> {
    let stats = engine.expert_stats();
    let total = stats.hits + stats.guessed_hits + stats.misses;
    (total > 0).then(|| stats.hits as f64 / total as f64)
}

/// The line of figures.
pub fn figures(engine: &Engine, generated: &Generated) -> String {
    let stats = engine.expert_stats();
    let mut parts = vec![
        format!("{} ({})", output::counted(generated.ids.len(), "token"), generated.finish.name()),
        format!("{:.1} tok/s", generated.tokens_per_s()),
    ];
    let prompt = output::counted(generated.prompt_tokens, "token");
    parts.push(match generated.ttft_s {
        Some(seconds) => format!("first token after {:.0} ms (prompt {prompt})", seconds * 1e3),
        None => format!("{prompt} of the prompt read"),
    });
    if let Some(rate) = hit_rate(engine) {
        parts.push(format!("expert hit rate {:.1} %", rate * 100.0));
    }
    parts.push(format!("{} read", output::bytes(stats.bytes_read)));
    if let Some(peak) = Machine::default().peak_rss_bytes() {
        parts.push(format!("peak RAM {}", output::bytes(peak)));
    }
    parts.join(" | ")
}

/// Seconds and shares of every activity, reading the prompt and answering side by side.
fn profile_table(spent: &Spent) -> String {
    let total = |stage: Stage| spent[stage as usize].iter().sum::<Duration>().as_secs_f64();
    let cell = |stage: Stage, at: usize| {
        let seconds = spent[stage as usize][at].as_secs_f64();
        let share = if total(stage) > 0.0 { 100.0 * seconds / total(stage) } else { 0.0 };
        format!("{seconds:9.3} s {share:5.1} %")
    };
    let mut lines = vec![format!("{:<16}{:>19}{:>21}", "", "prefill", "decode")];
    for (at, activity) in Activity::ALL.into_iter().enumerate() {
        let [prefill, decode] = [Stage::Prefill, Stage::Decode].map(|stage| cell(stage, at));
        lines.push(format!("{:<16}{prefill}  {decode}", activity.name().replace('_', " ")));
    }
    let [prefill, decode] = [Stage::Prefill, Stage::Decode].map(total);
    lines.push(format!("{:<16}{prefill:9.3} s{:>10}{decode:11.3} s", "wall", ""));
    lines.join("\n")
}

/// The phases of a profile, in seconds.
fn profile_json(spent: &Spent) -> serde_json::Value {
    let stage = |stage: Stage| {
        let spent = &spent[stage as usize];
        let entries = Activity::ALL.into_iter().zip(spent);
        let entries =
            entries.map(|(activity, time)| (activity.name().to_owned(), json!(time.as_secs_f64())));
        serde_json::Value::Object(entries.collect())
    };
    json!({ "prefill": stage(Stage::Prefill), "decode": stage(Stage::Decode) })
}

fn json_figures(
    engine: &Engine,
    generated: &Generated,
    text: String,
    sampler: runtime::SamplerOptions,
) -> serde_json::Value {
    let mut figures = json!({
        "text": text,
        "ids": generated.ids,
        "finish_reason": generated.finish.name(),
        "fingerprint": generated.fingerprint,
        "seed": (sampler.temperature > 0.0).then_some(sampler.seed),
        "prompt_tokens": generated.prompt_tokens,
        "tok_per_s": generated.tokens_per_s(),
        "ttft_ms": generated.ttft_s.map(|seconds| seconds * 1e3),
        "hit_rate": hit_rate(engine),
        "guessed_hits": engine.expert_stats().guessed_hits,
        "bytes_read": engine.expert_stats().bytes_read,
        "io": engine.io().name(),
        "prefetch": engine.experts().read_ahead().name(),
        "peak_rss_bytes": Machine::default().peak_rss_bytes(),
        "numerics_version": NUMERICS_VERSION,
        "isa": engine.compute().isa.level().name(),
        "threads": engine.compute().team.threads(),
        "activations": engine.compute().activations.to_string(),
        "context": engine.context(),
        "ram_ceiling_bytes": engine.ledger().limit(),
        "expert_cache_bytes": engine.cache_bytes(),
    });
    if let Some(spent) = &generated.spent {
        figures["phases"] = profile_json(spent);
    }
    figures
}
