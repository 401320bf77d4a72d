//! `coli cluster worker` as a process.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::TcpStream;
use std::process::{Child, Stdio};

use cluster::wire::Shape;
use cluster::wire::v1::{OK, ReplyReader, put_item, put_request};

use crate::support::{arg, coli, hummingbird, run};

const SHAPE: Shape = Shape { hidden: 256, intermediate: 128, layers: 8, experts: 24 };

/// A worker that is ended when dropped.
struct Worker {
    child: Child,
    address: String,
}

impl Worker {
    fn start(args: &[&str]) -> Worker {
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
    let answers = [
        &["--isa", "scalar", "--threads", "1"][..],
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
