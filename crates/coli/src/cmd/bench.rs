//! `coli bench`: speed beside the physical limit.

use std::path::Path;
use std::sync::Arc;

use container::{ChatTemplate, Tokenizer};
use experts::simulate::{Policy, Replay};
use experts::{RouteShape, Trace};
use formats::Format;
use lab::bench::{self, KernelFigures, KernelOptions, READ_BYTES, Rates, Scenario};
use numerics::{Activations, Isa, Level, Team};
use runtime::Engine;
use runtime::machine::Machine;
use serde_json::{Value, json};

use crate::args::{
    BenchArgs, BenchCacheArgs, BenchCommand, BenchDecodeArgs, BenchIoArgs, BenchKernelsArgs,
    BenchPrefillArgs, BenchStreamArgs, BenchUxArgs,
};
use crate::failure::Failure;
use crate::{Outcome, model, output};

/// Least prompt tokens of `bench ux`.
const UX_PROMPT_LEAST: usize = 32;
/// Bytes of text that the long-document question of `bench ux` is about, at most.
const DOCUMENT_BYTES: usize = 6000;

pub fn run(args: &BenchArgs) -> Outcome {
    match &args.what {
        BenchCommand::Decode(args) => decode(args),
        BenchCommand::Prefill(args) => prefill(args),
        BenchCommand::Kernels(args) => kernels(args),
        BenchCommand::Io(args) => io(args),
        BenchCommand::Stream(args) => stream(args),
        BenchCommand::Cache(args) => cache(args),
        BenchCommand::Cluster(args) => super::bench_cluster::run(args),
        BenchCommand::Ux(args) => ux(args),
    }
}

/// `median (least to greatest)`.
fn rates(rates: &Rates) -> String {
    format!("{:.2} ({:.2} to {:.2})", rates.median, rates.spread.0, rates.spread.1)
}

fn decode(args: &BenchDecodeArgs) -> Outcome {
    if args.batch > 1 {
        return decode_batch(args);
    }
    let positions = args.tokens.saturating_add(bench::DECODE_PROMPT);
    let engine = model::open_for_bench(&args.engine, READ_BYTES as u64, 1, positions)?;
    let figures = bench::decode(&engine, args.tokens, args.options.reps)?;
    if args.options.json {
        output::print_json(&json!({
            "tok_per_s": figures.tok_per_s.median,
            "tok_per_s_min": figures.tok_per_s.spread.0,
            "tok_per_s_max": figures.tok_per_s.spread.1,
            "bytes_per_token": figures.bytes_per_token,
            "read_gb_per_s": figures.read_gb_per_s,
            "limit_tok_per_s": figures.limit_tok_per_s(),
            "limit_ratio": figures.limit_ratio(),
        }));
        return Ok(());
    }
    say!(
        "decode {} tok/s | {} per token | read loop {:.1} GB/s | limit {:.2} tok/s | {:.0} % of it",
        rates(&figures.tok_per_s),
        output::bytes(figures.bytes_per_token),
        figures.read_gb_per_s,
        figures.limit_tok_per_s(),
        figures.limit_ratio() * 100.0
    );
    Ok(())
}

fn decode_batch(args: &BenchDecodeArgs) -> Outcome {
    let (held, positions) = (READ_BYTES as u64, args.tokens.saturating_add(bench::DECODE_PROMPT));
    let engine = model::open_for_bench(&args.engine, held, args.batch, positions)?;
    let figures = bench::decode_batch(&engine, args.batch, args.tokens, args.options.reps)?;
    let (gain, allowed) = (figures.gain(), figures.allowed_gain());
    if args.options.json {
        output::print_json(&json!({
            "batch": figures.batch,
            "tok_per_s": figures.tok_per_s.median,
            "single_tok_per_s": figures.single_tok_per_s.median,
            "single_bytes_per_step": figures.single_bytes,
            "batch_bytes_per_step": figures.batch_bytes,
            "attended_bytes_per_sequence": figures.attended_bytes,
            "read_gb_per_s": figures.read_gb_per_s,
            "gain": gain,
            "allowed_gain": allowed,
            "limit_ratio": gain / allowed,
        }));
        return Ok(());
    }
    say!(
        "decode of {} sequences {} tok/s, of one {} tok/s | gain {gain:.2} of {allowed:.2} that the \
         bytes allow: {:.0} % | logits as alone",
        figures.batch,
        rates(&figures.tok_per_s),
        rates(&figures.single_tok_per_s),
        gain / allowed * 100.0
    );
    say!(
        "a step reads {}, of one sequence {} (keys and values: {} for each) | read loop {:.1} GB/s",
        output::bytes(figures.batch_bytes),
        output::bytes(figures.single_bytes),
        output::bytes(figures.attended_bytes),
        figures.read_gb_per_s
    );
    Ok(())
}

fn prefill(args: &BenchPrefillArgs) -> Outcome {
    let engine = model::open_for_bench(&args.engine, READ_BYTES as u64, 1, args.tokens)?;
    let figures = bench::prefill(&engine, args.tokens, args.options.reps)?;
    if args.options.json {
        output::print_json(&json!({
            "tokens": args.tokens,
            "tok_per_s": figures.tok_per_s.median,
            "tok_per_s_min": figures.tok_per_s.spread.0,
            "tok_per_s_max": figures.tok_per_s.spread.1,
            "bytes_per_token": figures.bytes_per_token,
            "products_per_token": figures.products_per_token,
            "read_gb_per_s": figures.read_gb_per_s,
            "multiply_gmac_per_s": figures.multiply_gmac_per_s,
            "limit_tok_per_s": figures.limit_tok_per_s(),
            "limit_ratio": figures.limit_ratio(),
        }));
        return Ok(());
    }
    say!(
        "prefill of {} tokens {} tok/s | {} and {:.2} GMAC per token | read loop {:.1} GB/s, \
         multiply loop {:.0} GMAC/s | limit {:.0} tok/s | {:.0} % of it",
        args.tokens,
        rates(&figures.tok_per_s),
        output::bytes(figures.bytes_per_token),
        figures.products_per_token as f64 / 1e9,
        figures.read_gb_per_s,
        figures.multiply_gmac_per_s,
        figures.limit_tok_per_s(),
        figures.limit_ratio() * 100.0
    );
    Ok(())
}

fn kernels(args: &BenchKernelsArgs) -> Outcome {
    let threads = args.threads.unwrap_or_else(|| Machine::default().compute_threads());
    let team = Team::new(threads).map_err(runtime::OpenError::from)?;
    let options = KernelOptions {
        levels: levels(&args.isa)?,
        formats: args.formats.clone(),
        rows: args.rows.clone(),
        activations: if args.activations.is_empty() {
            vec![Activations::Int8, Activations::F32]
        } else {
            args.activations.clone()
        },
        repetitions: args.options.reps,
    };
    if options.activations == [Activations::Int8] && !options.formats.is_empty() {
        let exact = |format: &&Format| !format.takes_int8_activations();
        let left_out: Vec<&Format> = options.formats.iter().filter(exact).collect();
        if left_out.len() == options.formats.len() {
            return Err(Failure::usage(
                "these formats take no int8 activations; give --activations f32",
            ));
        }
        for format in left_out {
            note!("{format} takes no int8 activations: left out");
        }
    }
    let mut all = Vec::new();
    if !args.options.json {
        say!("{}, matrix of 1024 x 2048", output::counted(threads, "thread"));
        say!("{:<28}{:<12}{:>8}{:>10}{:>10}", "kernel", "level", "GB/s", "GMAC/s", "of limit");
    }
    bench::kernels(&Arc::new(team), &options, &mut |figures| {
        if args.options.json {
            all.push(kernel_json(figures));
            return;
        }
        say!(
            "{:<28}{:<12}{:>8.2}{:>10.1}{:>8.0} %",
            figures.name,
            figures.level,
            figures.gb_per_s,
            figures.gmac_per_s,
            figures.limit_ratio * 100.0
        );
    })?;
    if args.options.json {
        output::print_json(&Value::Array(all));
    }
    Ok(())
}

fn kernel_json(figures: &KernelFigures) -> Value {
    json!({
        "name": figures.name,
        "level": figures.level,
        "gb_per_s": figures.gb_per_s,
        "gmac_per_s": figures.gmac_per_s,
        "limit_ratio": figures.limit_ratio,
    })
}

/// The levels named; all that the CPU has for `all`, its highest for none.
fn levels(names: &[String]) -> Result<Vec<Isa>, Failure> {
    match names {
        [] => Ok(vec![Isa::detect()]),
        [all] if all == "all" => Ok(Isa::available().collect()),
        names => names
            .iter()
            .map(|name| {
                let level: Level =
                    name.parse().map_err(|error| Failure::usage(format!("--isa: {error}")))?;
                Isa::at(level).ok_or_else(|| {
                    let have: Vec<_> = Isa::available().map(|isa| isa.level().name()).collect();
                    Failure::usage(format!(
                        "--isa: this CPU does not have {level}; it has {}",
                        have.join(", ")
                    ))
                })
            })
            .collect(),
    }
}

fn io(args: &BenchIoArgs) -> Outcome {
    let model = container::Model::open(&model::dirs(&args.model)?)?;
    let figures = bench::io(&model, args.options.reps, &mut |text| note!("left out: {text}"))?;
    if args.options.json {
        let readers = figures.iter().map(|figures| {
            json!({
                "reader": figures.reader,
                "gb_per_s": figures.gb_per_s.median,
                "device_gb_per_s": figures.device_gb_per_s.median,
                "device_ratio": figures.device_ratio(),
            })
        });
        output::print_json(&Value::Array(readers.collect()));
        return Ok(());
    }
    for figures in figures {
        say!(
            "{:<9} experts {} GB/s | direct reads of the same files {} GB/s | {:.0} % of them",
            figures.reader,
            rates(&figures.gb_per_s),
            rates(&figures.device_gb_per_s),
            figures.device_ratio() * 100.0
        );
    }
    Ok(())
}

fn cache(args: &BenchCacheArgs) -> Outcome {
    let trace = Trace::load(&args.trace, RouteShape::ANY)?;
    let replay = Replay::of(&trace);
    let (uses, experts) = (replay.uses(), replay.all_experts());
    if uses == 0 {
        let file = args.trace.display();
        return Err(Failure::usage(format!("{file}: the trace has no calls; record one again")));
    }
    let mut sizes = Vec::new();
    let header = ["cache", "experts", "LRU", "LFU", "ours", "static", "Belady", "gap to Belady"];
    let mut rows = vec![header.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>()];
    for percent in &args.sizes {
        let slots = (experts * percent / 100).max(1);
        let rate = |policy| replay.hits(policy, slots) as f64 / uses as f64;
        let rates = Policy::ALL.map(rate);
        let gap = rates[Policy::Belady as usize] - rates[Policy::Ours as usize];
        let mut row = vec![format!("{percent} %"), slots.to_string()];
        row.extend(rates.iter().map(|rate| format!("{:.1} %", rate * 100.0)));
        row.push(format!("{:.1} points", gap * 100.0));
        rows.push(row);
        let named = Policy::ALL.iter().zip(rates);
        let named = named.map(|(policy, rate)| (policy.name().to_owned(), json!(rate)));
        let hit_rates: serde_json::Map<String, Value> = named.collect();
        sizes.push(json!({
            "percent": percent, "experts": slots, "hit_rates": hit_rates, "belady_gap": gap,
        }));
    }
    if args.json {
        output::print_json(&json!({"uses": uses, "experts": experts, "sizes": sizes}));
        return Ok(());
    }
    say!(
        "{} of {} in {} calls; hit rates:",
        output::counted(uses as usize, "use"),
        output::counted(experts, "expert"),
        output::count(trace.calls().len() as u64)
    );
    let right = [false, true, true, true, true, true, true, true];
    say_part!("{}", output::table(&rows, &right));
    say!("static and Belady know the whole trace beforehand; static begins with a full cache");
    Ok(())
}

fn stream(args: &BenchStreamArgs) -> Outcome {
    let positions = args.tokens.saturating_add(bench::DECODE_PROMPT);
    let engine = model::open_for_bench(&args.engine, 0, 1, positions)?;
    let figures = bench::stream(&engine, args.tokens, args.options.reps)?;
    if args.options.json {
        output::print_json(&json!({
            "tok_per_s": figures.tok_per_s.median,
            "tok_per_s_min": figures.tok_per_s.spread.0,
            "tok_per_s_max": figures.tok_per_s.spread.1,
            "bytes_per_token": figures.bytes_per_token,
            "hit_rate": figures.hit_rate,
            "guessed_rate": figures.guessed_rate,
            "read_ms": figures.read_ms(),
            "demand_ms": figures.demand_ms,
            "idle_ms": figures.idle_ms,
            "wait_ms": figures.wait_ms,
            "device_gb_per_s": figures.device_gb_per_s.median,
            "device_ratio": figures.device_ratio.median,
            "limit_tok_per_s": figures.limit_tok_per_s(),
            "time_ratio": figures.time_ratio.median,
            "fingerprint": figures.fingerprint,
        }));
        return Ok(());
    }
    say!(
        "decode {} tok/s | {} read per token, {:.0} % of experts in memory, {:.0} % guessed",
        rates(&figures.tok_per_s),
        output::bytes(figures.bytes_per_token as u64),
        figures.hit_rate * 100.0,
        figures.guessed_rate * 100.0
    );
    say!(
        "drive {} GB/s by direct reads | {:.0} % of it ({:.0} to {:.0}) while a read was known",
        rates(&figures.device_gb_per_s),
        figures.device_ratio.median * 100.0,
        figures.device_ratio.spread.0 * 100.0,
        figures.device_ratio.spread.1 * 100.0
    );
    say!(
        "a token must take {:.0} ms for its bytes and {:.0} ms in which no read was known: limit \
         {:.2} tok/s, token time {:.2} x ({:.2} to {:.2}) | waited {:.0} ms",
        figures.read_ms(),
        figures.idle_ms,
        figures.limit_tok_per_s(),
        figures.time_ratio.median,
        figures.time_ratio.spread.0,
        figures.time_ratio.spread.1,
        figures.wait_ms
    );
    Ok(())
}

fn ux(args: &BenchUxArgs) -> Outcome {
    if args.tokens < 2 {
        return Err(Failure::usage(
            "--tokens 1 leaves no tokens after the first to time; give 2 or more",
        ));
    }
    let engine =
        model::open_for_bench(&args.engine, 0, 1, args.tokens.saturating_add(UX_PROMPT_LEAST))?;
    let dirs = model::dirs(&args.engine.model)?;
    let scenarios = [
        ("short chat", "What is a river, and where does it come from?".to_owned()),
        ("long document", format!("{}\nWhich river is the longest of these?", document())),
    ];
    let scenarios: Vec<Scenario> = scenarios
        .into_iter()
        .map(|(name, text)| {
            let mut prompt = prompt(&engine, &dirs[0], &text)?;
            // A context that holds less gets the end of the document and the question.
            let room = engine.context().saturating_sub(args.tokens).max(1);
            prompt.drain(..prompt.len().saturating_sub(room));
            Ok(Scenario { name, prompt, tokens: args.tokens })
        })
        .collect::<Result<_, Failure>>()?;
    let figures = bench::ux(&engine, &scenarios, args.options.reps)?;
    if args.options.json {
        let scenarios = figures.iter().map(|figures| {
            json!({
                "scenario": figures.name,
                "prompt_tokens": figures.prompt_tokens,
                "ttft_ms": figures.ttft_s.median * 1e3,
                "tok_per_s": figures.tok_per_s.median,
                "fingerprint": figures.fingerprint,
            })
        });
        output::print_json(&Value::Array(scenarios.collect()));
        return Ok(());
    }
    for figures in figures {
        say!(
            "{}: {} | first token after {:.0} ms ({:.0} to {:.0}) | {} tok/s | fingerprint {}",
            figures.name,
            output::counted(figures.prompt_tokens, "prompt token"),
            figures.ttft_s.median * 1e3,
            figures.ttft_s.spread.0 * 1e3,
            figures.ttft_s.spread.1 * 1e3,
            rates(&figures.tok_per_s),
            &figures.fingerprint[..16]
        );
    }
    Ok(())
}

/// A text of many different sentences.
fn document() -> String {
    let names = ["Amel", "Bora", "Cind", "Dovra", "Elke", "Fann", "Gorin", "Hald", "Ister", "Jarn"];
    let mut text = String::new();
    for at in 0.. {
        let (name, other) = (names[at % 10], names[(at * 3 + 1) % 10]);
        text.push_str(&format!(
            "The river {name} of district {} is {} kilometres long and meets the {other} after {} \
             bends, where {} boats a day carry grain, timber and stone. ",
            at + 1,
            100 + at * 137 % 900,
            3 + at * 7 % 40,
            2 + at * 13 % 60
        ));
        if text.len() >= DOCUMENT_BYTES {
            break;
        }
    }
    text
}

/// Ids of a text as a user's turn, or as plain text where the model has no chat template. A model
/// without a tokenizer gets ids of no meaning.
fn prompt(engine: &Engine, dir: &Path, text: &str) -> Result<Vec<u32>, Failure> {
    let Some(tokenizer) = Tokenizer::load(dir)? else {
        let vocab = engine.config().vocab_size;
        return Ok(text.bytes().step_by(4).map(|byte| u32::from(byte) % vocab as u32).collect());
    };
    let text = match ChatTemplate::load(dir)? {
        None => text.to_owned(),
        Some(template) => {
            let messages = [json!({ "role": "user", "content": text })];
            template.render(&messages, true, None)?
        }
    };
    Ok(tokenizer.encode(&text, false)?)
}
