//! `coli doctor`: checks with a remedy each.

use cluster::coordinator::Examined;
use container::{ChatTemplate, Model, Tokenizer};
use experts::reader::open_files;
use experts::{FileSet, IoMode, Reader};
use lab::bench::Device;
use lab::check::check_tensors;
use lab::manifest::{FileRecord, Manifest, record};
use lab::mirror::verify;
use runtime::machine::Machine;
use runtime::{Engine, Want, Work};
use serde_json::json;
use std::path::PathBuf;
use std::sync::Arc;

use crate::args::DoctorArgs;
use crate::cmd::info::presence;
use crate::failure::Failure;
use crate::progress::Progress;
use crate::{Outcome, model, output, workers};

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum State {
    Pass,
    Skip,
    Warn,
    Fail,
}

impl State {
    fn name(self) -> &'static str {
        match self {
            State::Pass => "pass",
            State::Skip => "skip",
            State::Warn => "warn",
            State::Fail => "fail",
        }
    }
}

struct Check {
    id: &'static str,
    state: State,
    detail: String,
    remedy: String,
}

#[derive(Default)]
struct Checks(Vec<Check>);

impl Checks {
    fn add(&mut self, id: &'static str, state: State, detail: String, remedy: &str) {
        self.0.push(Check { id, state, detail, remedy: remedy.to_owned() });
    }

    fn pass(&mut self, id: &'static str, detail: String) {
        self.add(id, State::Pass, detail, "");
    }

    fn fail(&mut self, id: &'static str, detail: String, remedy: &str) {
        self.add(id, State::Fail, detail, remedy);
    }
}

pub fn run(args: &DoctorArgs) -> Outcome {
    let mut checks = Checks::default();
    examine(args, &mut checks)?;
    let worst = checks.0.iter().map(|check| check.state).max().unwrap_or(State::Pass);
    if args.json {
        let list: Vec<_> = checks
            .0
            .iter()
            .map(|check| {
                json!({
                    "id": check.id, "state": check.state.name(),
                    "detail": check.detail, "remedy": check.remedy,
                })
            })
            .collect();
        output::print_json(&json!(list));
    } else {
        for check in &checks.0 {
            say!("{:4}  {:12} {}", check.state.name(), check.id, check.detail);
            if !check.remedy.is_empty() {
                say!("{:18} -> {}", "", check.remedy);
            }
        }
    }
    match worst {
        State::Pass | State::Skip => Ok(()),
        State::Warn => Err(Failure::Reported(1)),
        State::Fail => Err(Failure::Reported(2)),
    }
}

fn examine(args: &DoctorArgs, checks: &mut Checks) -> Outcome {
    let machine = Machine::default();
    match machine.memory_available() {
        Some(bound) => checks.pass(
            "memory",
            format!("{} free, bounded by {}", output::bytes(bound.bytes), bound.bound_by),
        ),
        None => checks.add(
            "memory",
            State::Warn,
            "the system does not say how much is free".to_owned(),
            "give --ram",
        ),
    }
    let isa = numerics::Isa::detect().level();
    checks.pass("cpu", format!("{isa}, {} compute threads", machine.compute_threads()));

    let dirs = model::dirs(&args.engine.model)?;
    let opened = match Model::open(&dirs) {
        Ok(opened) => opened,
        Err(error) => {
            checks.fail("container", error.to_string(), "");
            for id in ["tokenizer", "template", "load", "tensors"] {
                checks.add(id, State::Skip, "the container does not open".to_owned(), "");
            }
            return Ok(());
        }
    };
    let report = opened.report();
    checks.pass(
        "container",
        format!(
            "{}, {} in {}, indexer {}, MTP {}",
            opened.config.family.row().name,
            output::bytes(report.bytes()),
            output::counted(report.shards.found, "file"),
            presence(&report.indexer),
            presence(&report.mtp)
        ),
    );
    for warning in &report.warnings {
        checks.add("container", State::Warn, warning.clone(), "see docs/formats.md");
    }
    if let Some(unused) = model::unused(report) {
        checks.add("unused", State::Warn, unused, "check that config.json is this model's");
    }
    for ((class, format), used) in &report.stored {
        if used.tensors > 0 && ["int4-row", "int2-row"].contains(&format.as_str()) {
            let detail = format!("{} are stored as {format}", class.name());
            let remedy =
                "one scale per row is known to answer poorly; int4-g64 takes 4.5 bits a weight";
            checks.add("format", State::Warn, detail, remedy);
        }
    }
    examine_storage(&opened, checks);
    examine_text(&opened, &dirs[0], checks);
    if opened.config.stop_ids.is_empty() {
        checks.add(
            "stop ids",
            State::Warn,
            "neither config.json nor generation_config.json names one".to_owned(),
            "answers end at --max-tokens only; add eos_token_id to generation_config.json",
        );
    } else {
        checks.pass("stop ids", format!("{:?}", opened.config.stop_ids));
    }
    if args.cluster {
        examine_cluster(args, &opened, checks)?;
    }
    if !args.deep {
        let detail = "only headers were read".to_owned();
        checks.add("tensors", State::Skip, detail, "coli doctor --deep reads every byte");
        return Ok(());
    }
    examine_manifest(&dirs, checks);
    let files = FileSet::open(&opened.shards);
    match files {
        Err(error) => checks.fail("tensors", error.to_string(), ""),
        Ok(files) => {
            let reader = Reader::new(Arc::new(files));
            let mut progress = Progress::bytes("checking tensors");
            let result =
                check_tensors(&opened, &reader, &mut |done, total| progress.set(done, total));
            drop(progress);
            match result {
                Ok(count) => checks.pass("tensors", format!("{count} read, all values usable")),
                Err(error) => checks.fail(
                    "tensors",
                    error.to_string(),
                    "fetch or convert the named file again",
                ),
            }
        }
    }
    if !opened.shards.records().is_empty() {
        examine_records(&opened, checks);
    }
    drop(opened);
    match one_step(args) {
        Ok(detail) => checks.pass("load", detail),
        Err(failure @ (Failure::Failed(_) | Failure::Unusable(_))) => {
            let (Failure::Failed(error) | Failure::Unusable(error)) = &failure else {
                return Ok(());
            };
            checks.fail("load", error.to_string(), "");
        }
        Err(reported) => return Err(reported),
    }
    Ok(())
}

/// Whether workers compute what this machine does.
fn examine_cluster(args: &DoctorArgs, opened: &Model, checks: &mut Checks) -> Outcome {
    let examined = workers::examine(&args.engine, opened)?;
    if examined.is_empty() {
        let remedy = "start coli cluster worker with the same --cluster-registry";
        checks.add("worker", State::Warn, "the registry lists none".to_owned(), remedy);
    }
    for Examined { name, compared, first, second, problem, .. } in examined {
        match problem {
            None => checks.pass(
                "worker",
                format!(
                    "{name}: {} as here; {:.1} ms at first, {:.2} ms again",
                    output::counted(compared, "expert"),
                    first.as_secs_f64() * 1e3,
                    second.as_secs_f64() * 1e3
                ),
            ),
            Some(why) => checks.fail(
                "worker",
                format!("{name}: {why}"),
                "see its own output, and coli cluster status",
            ),
        }
    }
    Ok(())
}

/// How experts lie in the files, and how the files can be read.
fn examine_storage(opened: &Model, checks: &mut Checks) {
    let records = opened.shards.records().len();
    let detail = match records {
        0 => "rows, arranged at every load; coli convert lays experts out as one read each".into(),
        _ => format!("native, {} with hashes", output::counted(records, "expert")),
    };
    checks.pass("layout", detail);
    match FileSet::open(&opened.shards) {
        Err(error) => checks.fail("reads", error.to_string(), ""),
        Ok(files) => match open_files(files, IoMode::Uring) {
            opened if opened.mode == IoMode::Uring => {
                checks.pass("reads", "direct, io_uring".to_owned());
            }
            opened => {
                let why = opened.fallback.unwrap_or_default();
                let detail = format!("{} at best: {why}", opened.mode.name());
                checks.add("reads", State::Pass, detail, "");
            }
        },
    }
    match Device::of(&opened.shards).and_then(|device| device.measure(0)) {
        Ok(rate) => checks.pass("drive", format!("{rate:.2} GB/s by direct reads")),
        Err(error) => checks.add("drive", State::Skip, error.to_string(), ""),
    }
}

/// Compares every expert with the hashes of its record.
fn examine_records(opened: &Model, checks: &mut Checks) {
    let mut first = None;
    let mut count = 0;
    let read = verify(opened, &opened.shards, &mut |layer, expert, why| {
        count += 1;
        first.get_or_insert_with(|| format!("layer {layer}, expert {expert}: {why}"));
    });
    match (read, first) {
        (Err(error), _) => checks.fail("records", error.to_string(), ""),
        (Ok(read), None) => {
            checks.pass("records", format!("{} as recorded", output::counted(read, "expert")));
        }
        (Ok(read), Some(first)) => checks.fail(
            "records",
            format!("{count} of {read} are not as recorded, first {first}"),
            "fetch or convert the named file again",
        ),
    }
}

/// Compares every file of a converted container with the hash in its manifest.
fn examine_manifest(dirs: &[PathBuf], checks: &mut Checks) {
    for dir in dirs {
        let manifest = match Manifest::load(dir) {
            Ok(Some(manifest)) => manifest,
            Ok(None) => continue,
            Err(error) => {
                checks.add("manifest", State::Warn, error.to_string(), "convert again");
                continue;
            }
        };
        let differs =
            |file: &&FileRecord| record(dir, &file.name).map_or(true, |found| found != **file);
        match manifest.files.iter().find(differs) {
            Some(file) => checks.fail(
                "manifest",
                format!("{} is not what was converted", dir.join(&file.name).display()),
                "fetch that file again, or give the convert command that made it",
            ),
            None => checks
                .pass("manifest", output::counted(manifest.files.len(), "file") + " as converted"),
        }
    }
}

fn examine_text(opened: &Model, dir: &std::path::Path, checks: &mut Checks) {
    match Tokenizer::load(dir) {
        Err(error) => checks.fail("tokenizer", error.to_string(), ""),
        Ok(None) => checks.add(
            "tokenizer",
            State::Warn,
            format!("no tokenizer in {}", dir.display()),
            "fetch tokenizer.json; without it only --ids works",
        ),
        Ok(Some(tokenizer)) => {
            let (ids, vocab) = (tokenizer.vocab_size(), opened.config.vocab_size);
            if ids > vocab {
                let detail = format!("{ids} ids, but the model's vocabulary is {vocab}");
                checks.fail("tokenizer", detail, "this tokenizer belongs to another model");
            } else {
                checks.pass("tokenizer", format!("{ids} of {vocab} ids"));
            }
        }
    }
    match ChatTemplate::load(dir) {
        Err(error) => checks.fail("template", error.to_string(), ""),
        Ok(None) => checks.add(
            "template",
            State::Warn,
            "no chat template".to_owned(),
            "fetch chat_template.jinja; without it only `run` works",
        ),
        Ok(Some(template)) => {
            let messages = [json!({"role": "user", "content": "hello"})];
            match template.render(&messages, true, None) {
                Ok(_) => checks.pass("template", "renders a message".to_owned()),
                Err(error) => checks.fail("template", error.to_string(), ""),
            }
        }
    }
}

/// Loads the model as `run` does and computes one token.
fn one_step(args: &DoctorArgs) -> Result<String, Failure> {
    let options = model::engine_options(&args.engine)?;
    let engine = Engine::open(&options, &mut |_, _| {})?;
    let mut session = engine.session()?;
    let token = engine.config().bos.unwrap_or(0).min(engine.config().vocab_size as u32 - 1);
    let work = Work { session: &mut session, tokens: &[token], want: Want::Last };
    let hidden = engine.step(&mut [work])?.swap_remove(0);
    engine.logits(&hidden)?;
    Ok(format!(
        "one token computed; dense weights {}, expert cache {}",
        output::bytes(engine.dense_bytes()),
        output::bytes(engine.cache_bytes())
    ))
}
