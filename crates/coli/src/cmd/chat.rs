//! `coli chat`: a conversation with line editing, history and multi-line paste.

use std::borrow::Cow;
use std::io::{BufRead, IsTerminal, Read};

use container::{ChatTemplate, Tokenizer};
use reedline::{Prompt, PromptEditMode, PromptHistorySearch, Reedline, Signal};
use runtime::machine::Machine;
use runtime::{
    Engine, FinishReason, Generated, Generation, GenerationOptions, Phase, SamplerOptions, Session,
};
use serde_json::{Map, Value, json};

use crate::args::ChatArgs;
use crate::cmd::run::Stream;
use crate::failure::Failure;
use crate::history::History;
use crate::progress::Progress;
use crate::{Outcome, interrupt, model, output, workers};

/// Longest line taken from a pipe.
const LINE_BYTES_MAX: u64 = 1 << 20;

const HELP: &str = "\
/reset   forget the conversation
/more    let the last answer go on
/stats   figures of the model and this conversation
/help    this list
/quit    leave (Ctrl-D too); Ctrl-C stops an answer
Alt-Enter begins a new line; a pasted text of several lines is one message";

pub fn run(args: &ChatArgs) -> Outcome {
    let sampler = model::sampler(&args.sampling)?;
    let dirs = model::dirs(&args.engine.model)?;
    let tokenizer = Tokenizer::load_required(&dirs[0])?;
    let template = ChatTemplate::load_required(&dirs[0])?;
    let model::Opened { engine, history, workers } = model::open(&args.engine)?;
    if let Some(on) = args.thinking {
        check_thinking(&engine, &template)?;
        note!("thinking {}", if on { "on" } else { "off" });
    }
    if sampler.temperature > 0.0 {
        note!("seed {}", sampler.seed);
    }
    let session = engine.session()?;
    let mut chat = Chat {
        args,
        engine: &engine,
        history: &history,
        tokenizer: &tokenizer,
        template: &template,
        sampler,
        session,
        messages: Vec::new(),
        answer_ids: Vec::new(),
        turns: 0,
        complete: false,
        failed: false,
    };
    chat.reset();
    interrupt::listen();
    if std::io::stdin().is_terminal() {
        note!("Type a message; /help lists commands.");
        chat.talk_to_terminal()?;
    } else {
        let mut stdin = std::io::stdin().lock();
        loop {
            let mut line = String::new();
            if (&mut stdin).take(LINE_BYTES_MAX).read_line(&mut line)? == 0 {
                break;
            }
            if line.len() as u64 == LINE_BYTES_MAX {
                return Err(Failure::usage(format!("a line of more than {LINE_BYTES_MAX} bytes")));
            }
            if !chat.take(line.trim_end_matches(['\r', '\n']))? {
                break;
            }
        }
    }
    let failed = chat.failed && !std::io::stdin().is_terminal();
    workers::note(&workers);
    if failed { Err(Failure::Reported(1)) } else { model::close(&engine) }
}

/// Refuses `--thinking` where it would change nothing.
fn check_thinking(engine: &Engine, template: &ChatTemplate) -> Outcome {
    let Some(thinking) = engine.config().family.row().thinking else {
        return Err(Failure::usage("--thinking: this family has no thinking mode to switch"));
    };
    let messages = [json!({"role": "user", "content": "hello"})];
    let render = |on: bool| {
        let variables = Map::from_iter([(thinking.switch.to_owned(), Value::Bool(on))]);
        template.render(&messages, true, Some(&variables))
    };
    if render(true)? == render(false)? {
        return Err(Failure::usage("--thinking: this model's chat template has no such switch"));
    }
    Ok(())
}

/// What is worth saying after every answer; `/stats` has the rest.
fn short_figures(generated: &Generated, room: usize) -> String {
    let end = match generated.finish {
        FinishReason::Stop => "",
        FinishReason::Cancelled => ", stopped",
        FinishReason::Length if room == 0 => ", cut by the end of the context (/reset)",
        FinishReason::Length => ", cut by --max-tokens (/more goes on)",
    };
    let tokens = output::counted(generated.ids.len(), "token");
    format!("({tokens}, {:.1} per second{end})", generated.tokens_per_s())
}

struct Chat<'a> {
    args: &'a ChatArgs,
    engine: &'a Engine,
    history: &'a History,
    tokenizer: &'a Tokenizer,
    template: &'a ChatTemplate,
    sampler: SamplerOptions,
    session: Session,
    messages: Vec<Value>,
    /// Ids of the last answer, for `/more`.
    answer_ids: Vec<u32>,
    turns: u64,
    /// Whether the last answer ended by itself.
    complete: bool,
    /// Whether an answer failed.
    failed: bool,
}

/// The prompt sign.
struct Sign;

impl Prompt for Sign {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        "you".into()
    }
    fn render_prompt_right(&self) -> Cow<'_, str> {
        "".into()
    }
    fn render_prompt_indicator(&self, _mode: PromptEditMode) -> Cow<'_, str> {
        "> ".into()
    }
    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        "...> ".into()
    }
    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        format!("search {}> ", search.term).into()
    }
}

impl Chat<'_> {
    fn talk_to_terminal(&mut self) -> Outcome {
        let mut editor = Reedline::create().use_bracketed_paste(true);
        loop {
            interrupt::clear();
            match editor.read_line(&Sign) {
                Ok(Signal::Success(line)) => {
                    if !self.take(&line)? {
                        return Ok(());
                    }
                }
                Ok(Signal::CtrlD) => return Ok(()),
                Ok(_) => note!("(Ctrl-D or /quit leaves)"),
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Takes one line; false ends the conversation. An answer that failed is reported and the
    /// conversation goes on without it.
    fn take(&mut self, line: &str) -> Result<bool, Failure> {
        interrupt::clear();
        match line.trim() {
            "" => {}
            "/quit" | "/exit" => return Ok(false),
            "/help" => say!("{HELP}"),
            "/reset" => {
                self.reset();
                say!("The conversation is forgotten.");
            }
            "/stats" => self.print_stats(),
            "/more" => {
                if self.answer_ids.is_empty() {
                    say!("There is no answer to go on with.");
                } else if self.complete {
                    say!("The answer was complete.");
                } else if let Err(failure) = self.answer(true) {
                    failure.print();
                    self.failed = true;
                }
            }
            command if command.starts_with('/') && !command.contains(char::is_whitespace) => {
                say!("There is no {command}.\n{HELP}");
            }
            text => {
                self.messages.push(json!({"role": "user", "content": text}));
                if let Err(failure) = self.answer(false) {
                    failure.print();
                    self.failed = true;
                    self.messages.pop();
                }
            }
        }
        Ok(true)
    }

    fn reset(&mut self) {
        self.messages.clear();
        self.answer_ids.clear();
        self.session.truncate(0);
        if let Some(system) = &self.args.system {
            self.messages.push(json!({"role": "system", "content": system}));
        }
    }

    /// Ids of the conversation so far, up to the opening of the next answer.
    fn prompt(&self) -> Result<Vec<u32>, Failure> {
        let mut variables = Map::new();
        if let (Some(on), Some(thinking)) =
            (self.args.thinking, self.engine.config().family.row().thinking)
        {
            variables.insert(thinking.switch.to_owned(), Value::Bool(on));
        }
        let text = self.template.render(&self.messages, true, Some(&variables))?;
        Ok(self.tokenizer.encode(&text, false)?)
    }

    fn answer(&mut self, more: bool) -> Outcome {
        let mut target = if more {
            // The conversation without the answer, then the answer's own ids.
            let answered = self.messages.pop();
            let prompt = self.prompt();
            self.messages.extend(answered);
            prompt?
        } else {
            self.answer_ids.clear();
            self.prompt()?
        };
        if target.is_empty() {
            return Err(Failure::usage("the chat template makes nothing of the conversation"));
        }
        target.extend_from_slice(&self.answer_ids);
        // What the session holds of it stays; at least one token must be fed to go on from.
        let held = self.session.tokens().iter().zip(&target).take_while(|(a, b)| a == b).count();
        self.session.truncate(held.min(target.len().saturating_sub(1)));
        let room = self.session.context();
        if target.len() > room {
            return Err(Failure::usage(format!(
                "the conversation has {} tokens, the context holds {room}; /reset or raise --ctx",
                target.len()
            )));
        }
        let fed = target.split_off(self.session.tokens().len());
        self.turns += 1;
        let sampler =
            SamplerOptions { seed: self.sampler.seed.wrapping_add(self.turns - 1), ..self.sampler };
        let options = GenerationOptions {
            max_tokens: self.args.sampling.max_tokens,
            sampler,
            stop_ids: self.engine.config().stop_ids.clone(),
            fingerprint: false,
            profile: false,
        };
        let mut stream = Stream::new(Some(self.tokenizer), true);
        let mut progress = Progress::share("reading the prompt");
        let generated =
            Generation::new(self.engine, options).run(&mut self.session, &fed, &mut |phase| {
                match phase {
                    Phase::Prefill(share) => progress.set_share(share),
                    Phase::Token(token) => stream.push(token),
                }
                !interrupt::asked()
            });
        drop(progress);
        stream.finish();
        let generated = generated?;
        self.history.turn_done(self.engine);
        if generated.ids.is_empty() && generated.finish == FinishReason::Cancelled {
            // Stopped before the answer began: the message is taken back.
            if !more {
                self.messages.pop();
            }
            note!("(stopped; the message was not answered)");
            return Ok(());
        }
        self.complete = generated.finish == FinishReason::Stop;
        self.answer_ids.extend_from_slice(&generated.ids);
        let text = self.tokenizer.decode(&self.answer_ids, true)?;
        let message = json!({"role": "assistant", "content": text});
        if more {
            self.messages.pop();
        }
        self.messages.push(message);
        note!("{}", short_figures(&generated, self.session.room()));
        Ok(())
    }

    fn print_stats(&self) {
        let stats = self.engine.expert_stats();
        let peak = Machine::default().peak_rss_bytes().map(output::bytes);
        let rows = [
            ("messages", self.messages.len().to_string()),
            (
                "context",
                format!("{} of {} tokens", self.session.tokens().len(), self.session.context()),
            ),
            (
                "expert cache",
                format!(
                    "{} of {}",
                    output::bytes(stats.cached_bytes),
                    output::bytes(self.engine.cache_bytes())
                ),
            ),
            ("expert hits, misses", format!("{}, {}", stats.hits, stats.misses)),
            ("guessed experts used", stats.guessed_hits.to_string()),
            ("read", output::bytes(stats.bytes_read)),
            ("waited for reads", format!("{:.2} s", stats.wait_s)),
            ("peak RAM", peak.unwrap_or_else(|| "unknown".to_owned())),
        ];
        let rows: Vec<Vec<String>> =
            rows.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
        say_part!("{}", output::table(&rows, &[]));
    }
}
