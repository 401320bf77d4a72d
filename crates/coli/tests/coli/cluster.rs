//! Expert workers as processes, and coordinators that use them.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use cluster::wire::Shape;
use cluster::wire::v1::{OK, ReplyReader, put_item, put_request};

use crate::support::{arg, coli, finish, fixture, hummingbird, run};

const SHAPE: Shape = Shape { hidden: 256, intermediate: 128, layers: 8, experts: 24 };

/// A worker that is ended when dropped.
pub struct Worker {
    pub child: Child,
    pub address: String,
}

impl Worker {
    pub fn start(args: &[&str]) -> Worker {
        let mut command = coli();
        command.args(["cluster", "worker", "--listen", "127.0.0.1:0"]).args(args);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
        let address = line.trim().strip_prefix("worker ready on ").unwrap_or_else(|| {
            let _ = child.kill();
            panic!("{line:?}")
        });
        Worker { address: address.to_owned(), child }
    }

    /// One row for an expert of a layer, and its output.
    fn ask(stream: &mut TcpStream, layer: u32, expert: u32) -> Vec<f32> {
        let row: Vec<f32> = (0..SHAPE.hidden).map(|at| (at as f32 * 0.3).sin()).collect();
        let mut request = Vec::new();
        put_request(&mut request, &SHAPE, layer, 1);
        put_item(&mut request, expert, [&row[..]].into_iter());
        stream.write_all(&request).unwrap();
        let mut reader = ReplyReader::new(SHAPE.hidden, vec![(expert, 1)]);
        let mut buffer = [0; 4096];
        loop {
            let read = stream.read(&mut buffer).unwrap();
            assert!(read > 0, "the worker went away");
            if let Some(mut reply) = reader.take(&mut &buffer[..read]).unwrap() {
                assert_eq!(reply.status, OK);
                return reply.items.remove(0).rows;
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn workers_at_every_level_and_reader_answer_with_the_same_bits() {
    let model = hummingbird();
    let dir = tempfile::tempdir().unwrap();
    let pairs = dir.path().join("pairs");
    let trace = crate::support::root().join("fixtures/routes/hummingbird-code.txt");
    run(&["route", "pairs", "--trace", arg(&trace), "--out", arg(&pairs)]).expect(0);
    let answers = [
        &["--isa", "scalar", "--threads", "1"][..],
        &["--ram", "0.08", "--layers", "1-7", "--experts", "3-9", "--pairs", arg(&pairs)],
        &["--threads", "2", "--io", "direct"],
        &["--io", "buffered", "--layers", "2-7", "--experts", "3-9"],
        &["--ram", "0.08", "--read-limit", "0.5"],
    ];
    let answers = answers.map(|args| {
        let args = [args, &["--model", arg(&model)]].concat();
        let worker = Worker::start(&args);
        let mut stream = TcpStream::connect(&worker.address).unwrap();
        let answers = [(2, 3), (7, 9), (2, 3)].map(|(layer, expert)| {
            let answer = Worker::ask(&mut stream, layer, expert);
            answer.into_iter().map(f32::to_bits).collect::<Vec<_>>()
        });
        assert_eq!(answers[0], answers[2]);
        assert_ne!(answers[0], answers[1]);
        answers
    });
    assert!(answers.iter().all(|answer| *answer == answers[0]));
}

#[test]
#[cfg(unix)]
fn a_worker_that_is_told_to_end_closes_what_rests_and_says_what_it_did() {
    let mut worker = Worker::start(&["--model", arg(&hummingbird())]);
    let mut stream = TcpStream::connect(&worker.address).unwrap();
    Worker::ask(&mut stream, 3, 0);
    let id = worker.child.id().to_string();
    assert!(std::process::Command::new("kill").args(["-TERM", &id]).status().unwrap().success());
    assert_eq!(stream.read(&mut [0; 16]).unwrap(), 0);
    assert!(worker.child.wait().unwrap().success());
    let mut said = String::new();
    worker.child.stderr.take().unwrap().read_to_string(&mut said).unwrap();
    assert!(said.contains("1 request of 1 row for 1 connection answered, 0 failed"), "{said}");
}

#[test]
fn a_worker_refuses_what_it_cannot_serve_before_it_listens() {
    let model = hummingbird();
    for (args, what) in [
        (&["--listen", "0.0.0.0:0"][..], "--allow-plaintext"),
        (&["--layers", "9-12"], "it has layers 0-7, experts 0-23"),
        (&["--experts", "24"], "it has layers 0-7, experts 0-23"),
        (&["--layers", "5-2"], "must not be after the last"),
        (&["--ram", "0.02"], "needs at least --ram"),
        (&["--io", "mmap", "--read-limit", "1"], "--read-limit has no effect"),
    ] {
        let args = [&["cluster", "worker", "--model", arg(&model)], args].concat();
        let outcome = run(&args).expect(2);
        assert!(outcome.stderr.contains(what), "{args:?}: {}", outcome.stderr);
        assert_eq!(outcome.stdout, "");
    }
}

/// Workers of a model at different levels, thread counts, ceilings and readers.
pub fn fleet(model: &str, activations: &str, count: usize) -> Vec<Worker> {
    fleet_with(model, activations, count, &[])
}

/// The same with further flags.
pub fn fleet_with(model: &str, activations: &str, count: usize, flags: &[&str]) -> Vec<Worker> {
    let settings: [&[&str]; 3] = [
        &["--isa", "scalar", "--threads", "1"],
        &["--threads", "2", "--io", "direct", "--ram", "0.2"],
        &["--isa", "scalar", "--io", "buffered", "--ram", "0.5"],
    ];
    let common = ["--model", model, "--activations", activations];
    let start = |args: &&[&str]| Worker::start(&[args, &common[..], flags].concat());
    settings.iter().take(count).map(start).collect()
}

fn addresses(workers: &[Worker]) -> String {
    workers.iter().map(|worker| &worker.address[..]).collect::<Vec<_>>().join(",")
}

/// Teacher-forced and greedy against the reference; the fingerprint and what workers did.
fn oracle(name: &str, activations: &str, workers: &[Worker]) -> serde_json::Value {
    let model = fixture(name);
    let reference = model.join("ref.json");
    let list = addresses(workers);
    let mut args = vec!["oracle", "--model", arg(&model), "--reference", arg(&reference)];
    args.extend(["--activations", activations, "--fingerprint", "--json"]);
    if !workers.is_empty() {
        args.extend(["--cluster-workers", &list, "--no-hedge", "--no-keep-hot", "--audit", "0"]);
    }
    let outcome = run(&args);
    // Only f32 activations reproduce the reference's tokens.
    let codes: &[i32] = if activations == "f32" { &[0] } else { &[0, 1] };
    assert!(codes.contains(&outcome.code), "{name}: {}", outcome.stderr);
    outcome.json()
}

fn every_row_was_a_workers(name: &str, activations: &str, counts: std::ops::RangeInclusive<usize>) {
    let model = fixture(name);
    let alone = oracle(name, activations, &[]);
    assert_eq!(alone["cluster"], serde_json::Value::Null);
    for count in counts {
        let workers = fleet(arg(&model), activations, count);
        let with = oracle(name, activations, &workers);
        let what = format!("{name}, {activations}, {count} workers: {with}");
        assert_eq!(with["fingerprint"], alone["fingerprint"], "{what}");
        assert_eq!(with["mismatches"], alone["mismatches"], "{what}");
        let rows = &with["cluster"];
        assert!(rows["remote_rows"].as_u64() > Some(0), "{what}");
        for none in ["local_rows", "failed_over_rows", "hedged_rows", "audited_rows"] {
            assert_eq!(rows[none], 0, "{what}");
        }
        assert_eq!(rows["quarantined"], serde_json::json!([]), "{what}");
    }
}

#[test]
fn tokens_and_logits_with_one_two_and_three_workers_are_those_without() {
    for name in ["glm-dsa", "glm-int4-g64", "glm-e8", "olmoe-int4-g48"] {
        every_row_was_a_workers(name, "f32", 1..=3);
        every_row_was_a_workers(name, "int8", 1..=3);
    }
}

#[test]
fn every_fixture_has_the_same_logits_with_a_worker() {
    for entry in std::fs::read_dir(fixture("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        if fixture(&name).join("ref.json").is_file() {
            every_row_was_a_workers(&name, "int8", 1..=1);
        }
    }
}

/// The line of a run that has its fingerprint.
fn fingerprint(stderr: &[u8]) -> String {
    let text = String::from_utf8_lossy(stderr);
    let line = text.lines().find(|line| line.starts_with("fingerprint "));
    line.unwrap_or_else(|| panic!("{text}")).to_owned()
}

/// Kills one or two of three workers at some moments of a run; none changes a logit, and no run
/// ends.
fn kill_at_moments(model: &str, prompt: &[&str], moments: usize, mut seed: u64) {
    let generate = ["run", "--model", model, "--max-tokens", "60", "--fingerprint"];
    let generate = [&generate[..], prompt].concat();
    let alone = finish(coli().args(&generate)).expect(0);
    assert!(alone.stdout.len() > 100, "{}", alone.stdout);
    let want = fingerprint(alone.stderr.as_bytes());
    let mut next = |bound: usize| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (seed >> 33) as usize % bound
    };
    let mut workers = fleet(model, "int8", 3);
    let mut noticed = 0;
    for moment in 0..moments {
        let list = addresses(&workers);
        let mut command = coli();
        command.args(&generate).args(["--cluster-workers", &list]);
        command.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // After some of the answer: none of it is while workers join or the prompt is computed.
        let mut said = vec![0; next(alone.stdout.len())];
        child.stdout.as_mut().unwrap().read_exact(&mut said).unwrap();
        let first = next(3);
        let mut killed = vec![first];
        killed.extend((next(3) == 0).then_some((first + 1) % 3));
        killed.iter().for_each(|at| workers[*at].child.kill().unwrap());
        let output = child.wait_with_output().unwrap();
        let stderr = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "moment {moment}: {stderr}");
        assert_eq!(fingerprint(&output.stderr), want, "moment {moment}: {stderr}");
        noticed += usize::from(stderr.contains("computed elsewhere"));
        let all = [said, output.stdout].concat();
        assert_eq!(String::from_utf8(all).unwrap(), alone.stdout, "moment {moment}: {stderr}");
        for at in killed {
            workers[at] = fleet(model, "int8", at + 1).remove(at);
        }
    }
    // Most were in time to matter.
    assert!(noticed * 2 > moments, "{noticed} of {moments}");
}

#[test]
fn workers_killed_at_25_moments_of_the_bundled_model_change_no_logit() {
    let prompt = ["--seed", "5", "--temperature", "0.9", "Once upon a time"];
    kill_at_moments(arg(&hummingbird()), &prompt, 25, 3);
}

#[test]
fn workers_killed_at_25_moments_of_a_synthetic_model_change_no_logit() {
    let dir = tempfile::tempdir().unwrap();
    let model = dir.path().join("model");
    let args = ["synth", arg(&model), "--like", "olmoe", "--layers", "3", "--experts", "16"];
    let shape =
        ["--hidden", "256", "--expert-intermediate", "128", "--vocab", "512", "--context", "256"];
    run(&[&args[..], &shape].concat()).expect(0);
    kill_at_moments(arg(&model), &["--ids", "5,6,7,8"], 25, 8);
}

#[test]
#[cfg(target_os = "linux")]
fn without_workers_no_socket_is_opened() {
    let sockets = |flags: &[&str]| {
        let mut command = coli();
        command.args(["chat", "--max-tokens", "3"]).args(flags);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut child = command.spawn().unwrap();
        // It answers, and then waits for more.
        child.stdin.as_mut().unwrap().write_all(b"hello\n").unwrap();
        child.stdout.as_mut().unwrap().read_exact(&mut [0; 1]).unwrap();
        let open = std::fs::read_dir(format!("/proc/{}/fd", child.id())).unwrap();
        let links = open.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
        let count = links.filter(|link| link.to_string_lossy().starts_with("socket:")).count();
        assert!(child.wait_with_output().unwrap().status.success());
        count
    };
    assert_eq!(sockets(&[]), 0);
    let worker = Worker::start(&["--model", arg(&hummingbird())]);
    assert!(sockets(&["--cluster-workers", &worker.address]) > 0);
}

#[test]
fn workers_that_cannot_be_used_as_asked_are_refused_before_work_starts() {
    let model = hummingbird();
    for (args, what) in [
        (&["run", "--ids", "1", "--cluster-workers", "10.1.2.3:9100"][..], "--allow-plaintext"),
        (&["run", "--ids", "1", "--cluster-workers", "nowhere"], "given as HOST:PORT"),
        (&["run", "--ids", "1", "--audit", "1"], "without --cluster-workers"),
        (&["run", "--ids", "1", "--place", "layers 1=x"], "without --cluster-workers"),
        (&["run", "--ids", "1", "--place", "1=x"], "must be `layers"),
        (
            &["run", "--ids", "1", "--cluster-workers", "[::1]:1", "--place", "layers 1=x"],
            "--place names \"x\"",
        ),
        (&["bench", "decode", "--cluster-workers", "127.0.0.1:1"], "does not use"),
        (&["tune", "--cluster-workers", "127.0.0.1:1"], "does not use"),
        (&["plan", "--cluster-workers", "127.0.0.1:1"], "does not use"),
    ] {
        let outcome = run(&[args, &["--model", arg(&model)]].concat()).expect(2);
        assert!(outcome.stderr.contains(what), "{args:?}: {}", outcome.stderr);
    }
    // Nobody is there: everything is computed here.
    let args = ["run", "--ids", "1,2", "--max-tokens", "2", "--json", "--model", arg(&model)];
    let outcome = run(&[&args[..], &["--cluster-workers", "127.0.0.1:1"]].concat()).expect(0);
    assert!(outcome.stderr.contains("cannot be reached"), "{}", outcome.stderr);
    let json = outcome.json();
    assert!(
        json["cluster"]["local_rows"].as_u64() > Some(0) && json["cluster"]["remote_rows"] == 0
    );
}
