use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cluster::identity::{Holdings, greeting};
use cluster::wire::Shape;
use cluster::wire::secure::Policy;
use cluster::wire::v1::{FAILED, Item, OK, Reply, ReplyReader, put_item, put_request};
use cluster::wire::v2::{Compute, Kind, Outputs, Status, put_frame};
use cluster::worker::{Limits, Opened, Server, Stop, Worker, WorkerOptions, open};
use container::{HeldExperts, Model};
use experts::load::{ExpertTable, LoadMemory, load_expert};
use experts::reader::{AtOnce, PageBuffer};
use experts::{FileSet, IoMode, ReadAhead, Reader};
use formats::{Input, expert_ffn};
use numerics::{Activations, Isa, Team};

use crate::support::fixture;

fn fixtures() -> Vec<String> {
    let entries = std::fs::read_dir(fixture("")).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let mut names: Vec<String> =
        names.filter(|name| fixture(name).join("config.json").is_file()).collect();
    names.sort();
    assert!(names.len() > 30, "{names:?}");
    names
}

fn compute(isa: Isa, threads: usize, activations: Activations) -> numerics::Compute {
    numerics::Compute::new(isa, Arc::new(Team::new(threads).unwrap()), activations)
}

fn opened(dir: &Path, held: HeldExperts, io: IoMode, compute: numerics::Compute) -> Opened {
    let options = WorkerOptions {
        dirs: vec![dir.to_owned()],
        held,
        ram_bytes: 400_000_000,
        process_bytes: 0,
        int8: true,
        io: Some(io),
        read_limit: None,
        read_ahead: ReadAhead::Off,
        policy: Policy { key: None, plain: true },
    };
    open(&options, compute).unwrap()
}

fn worker(name: &str, isa: Isa, activations: Activations) -> Worker {
    let compute = compute(isa, 2, activations);
    opened(&fixture(name), HeldExperts::ALL, IoMode::Buffered, compute).worker
}

/// Rows that look like activations.
fn rows(count: usize, hidden: usize, seed: usize) -> Vec<f32> {
    (0..count * hidden).map(|at| ((at * 37 + seed * 101) as f32 * 0.61).sin() * 1.7).collect()
}

/// Some experts of a layer with rows each.
fn items(shape: Shape, seed: usize) -> Vec<Item> {
    let hidden = shape.hidden as usize;
    let experts = [(1, 3), (0, 1), (shape.experts - 1, 5)];
    let item = |(expert, count): (u32, usize)| Item {
        expert,
        rows: rows(count, hidden, seed + expert as usize),
    };
    experts.map(item).into()
}

fn request_bytes(shape: Shape, layer: u32, items: &[Item]) -> Vec<u8> {
    let mut bytes = Vec::new();
    put_request(&mut bytes, &shape, layer, items.len());
    for item in items {
        put_item(&mut bytes, item.expert, item.rows.chunks_exact(shape.hidden as usize));
    }
    bytes
}

/// Outputs of experts computed one by one, here.
fn outputs(dir: &Path, layer: u32, items: &[Item], compute: &numerics::Compute) -> Vec<Item> {
    let model = Model::open(&[dir.to_owned()]).unwrap();
    let hidden = model.config.hidden_size;
    let held = HeldExperts::ALL;
    let table = ExpertTable::new(&model, model.held_experts(&held), true).unwrap();
    let reader = Reader::new(Arc::new(FileSet::open(&model.shards).unwrap()));
    let output = |item: &Item| {
        let key = (layer, item.expert);
        let source = table.expert(key);
        let mut slot = PageBuffer::zeroed(source.slot_bytes() as usize);
        let memory = &mut LoadMemory::default();
        load_expert(&reader, key, source, memory, &mut slot, &mut AtOnce).unwrap();
        let input = Input::new("rows", &item.rows[..], hidden);
        let mut out = vec![0.0; item.rows.len()];
        expert_ffn(compute, source.desc.view(&slot), &input, None, &mut out).unwrap();
        Item { expert: item.expert, rows: out }
    };
    items.iter().map(output).collect()
}

fn bits(items: &[Item]) -> Vec<(u32, Vec<u32>)> {
    let bits = |item: &Item| (item.expert, item.rows.iter().map(|x| x.to_bits()).collect());
    items.iter().map(bits).collect()
}

/// The first layer that a worker has experts of.
fn sparse_layer(worker: &Worker) -> u32 {
    worker.experts().table().keys().next().unwrap().0
}

fn asked(shape: Shape, items: &[Item]) -> Vec<(u32, u32)> {
    let rows = |item: &Item| item.rows.len() as u32 / shape.hidden;
    items.iter().map(|item| (item.expert, rows(item))).collect()
}

/// Sends a request and reads its reply; `None` when the connection ends before it.
fn ask(stream: &mut TcpStream, shape: Shape, layer: u32, items: &[Item]) -> Option<Reply> {
    stream.write_all(&request_bytes(shape, layer, items)).ok()?;
    let mut reader = ReplyReader::new(shape.hidden, asked(shape, items));
    let mut buffer = [0; 4096];
    loop {
        let read = stream.read(&mut buffer).ok().filter(|read| *read > 0)?;
        let mut input = &buffer[..read];
        if let Some(reply) = reader.take(&mut input).unwrap() {
            assert!(input.is_empty());
            return Some(reply);
        }
    }
}

/// Ends a server when dropped.
struct StopAtEnd(Stop);

impl Drop for StopAtEnd {
    fn drop(&mut self) {
        self.0.stop();
    }
}

/// Runs `with` beside a server of a worker; returns what the server said.
fn serving(
    worker: Worker,
    limits: Limits,
    with: impl FnOnce(&Server, &dyn Fn() -> TcpStream),
) -> Vec<String> {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let said = Arc::new(Mutex::new(Vec::new()));
    let notes = said.clone();
    let notice = Arc::new(move |text: &str| notes.lock().unwrap().push(text.to_owned()));
    let server = Server::new(listener, worker, limits, notice).unwrap();
    thread::scope(|scope| {
        scope.spawn(|| server.run());
        let connect = || {
            let stream = TcpStream::connect(address).unwrap();
            // A test that waits for ever says nothing.
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            stream
        };
        // Also when `with` panics.
        let _stop = StopAtEnd(server.stop());
        with(&server, &connect);
    });
    std::mem::take(&mut *said.lock().unwrap())
}

/// Whether the peer has closed; nothing else comes.
fn is_closed(stream: &mut TcpStream) -> bool {
    let mut rest = Vec::new();
    // Bytes that were not read make the system answer with a reset.
    match stream.read_to_end(&mut rest) {
        Ok(_) => rest.is_empty(),
        Err(error) => error.kind() == std::io::ErrorKind::ConnectionReset,
    }
}

#[test]
fn outputs_have_the_bits_of_experts_computed_one_by_one_in_every_format() {
    for name in fixtures() {
        for activations in [Activations::Int8, Activations::F32] {
            let worker = worker(&name, Isa::detect(), activations);
            let (shape, layer) = (worker.shape(), sparse_layer(&worker));
            let items = items(shape, 1);
            let want =
                outputs(&fixture(&name), layer, &items, &compute(Isa::SCALAR, 1, activations));
            let request = cluster::wire::v1::Request { layer, items: items.clone() };
            let (bytes, computed) = worker.reply(request);
            computed.unwrap();
            let mut reader = ReplyReader::new(shape.hidden, asked(shape, &items));
            let reply = reader.take(&mut &bytes[..]).unwrap().unwrap();
            assert_eq!(reply.status, OK);
            assert_eq!(bits(&reply.items), bits(&want), "{name}, {activations:?}");
        }
    }
}

#[test]
fn several_coordinators_are_answered_over_tcp_one_request_after_another() {
    let worker = worker("glm-dsa", Isa::detect(), Activations::Int8);
    let (shape, layer) = (worker.shape(), sparse_layer(&worker));
    let scalar = compute(Isa::SCALAR, 1, Activations::Int8);
    let said = serving(worker, Limits::new(1 << 20), |server, connect| {
        thread::scope(|scope| {
            for peer in 0..4 {
                let scalar = &scalar;
                let mut stream = connect();
                scope.spawn(move || {
                    for round in 0..5 {
                        let items = items(shape, 10 * peer + round);
                        let reply = ask(&mut stream, shape, layer, &items).unwrap();
                        let want = outputs(&fixture("glm-dsa"), layer, &items, scalar);
                        assert_eq!(bits(&reply.items), bits(&want));
                    }
                });
            }
        });
        let counts = server.worker().counts();
        assert_eq!((counts.connections, counts.requests, counts.rows), (4, 20, 20 * 9));
        assert_eq!((counts.failed, counts.refused), (0, 0));
    });
    assert_eq!(said, [""; 0]);
}

#[test]
fn a_worker_needs_no_more_of_a_model_than_the_experts_that_it_holds() {
    let whole = Model::open(&[fixture("olmoe-mha")]).unwrap();
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(fixture("olmoe-mha").join("config.json"), dir.path().join("config.json"))
        .unwrap();
    // One shard with the experts 2 to 4 of layer 1, as they are, and nothing else.
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for expert in 2..5 {
        for source in whole.expert_sources(1, expert).unwrap() {
            let entry = whole.shards.get(&source.name).unwrap();
            let file = std::fs::read(whole.shards.path(entry.file)).unwrap();
            let start = data.len();
            data.extend_from_slice(&file[entry.offset as usize..][..entry.len as usize]);
            header.insert(
                source.name.clone(),
                serde_json::json!({
                    "dtype": entry.dtype.to_string(),
                    "shape": entry.shape,
                    "data_offsets": [start, data.len()],
                }),
            );
        }
    }
    let mut text = serde_json::to_vec(&header).unwrap();
    text.resize(text.len().next_multiple_of(8), b' ');
    let shard = [&(text.len() as u64).to_le_bytes()[..], &text, &data].concat();
    std::fs::write(dir.path().join("model.safetensors"), shard).unwrap();

    let held = HeldExperts { layers: 1..2, experts: 2..5 };
    let compute_here = || compute(Isa::detect(), 2, Activations::Int8);
    for io in [IoMode::Buffered, IoMode::Direct] {
        let opened = opened(dir.path(), held.clone(), io, compute_here());
        assert_eq!(opened.experts, 3);
        let (worker, shape) = (opened.worker, Shape::of(&whole.config));
        let item = |expert| Item { expert, rows: rows(2, shape.hidden as usize, 3) };
        let (items, want) = (vec![item(4), item(2)], [item(4), item(2)]);
        let want =
            outputs(&fixture("olmoe-mha"), 1, &want, &compute(Isa::SCALAR, 1, Activations::Int8));
        serving(worker, Limits::new(1 << 20), |_, connect| {
            let reply = ask(&mut connect(), shape, 1, &items).unwrap();
            assert_eq!(bits(&reply.items), bits(&want));
            // What it does not hold is answered as failed, and the connection ends.
            for (layer, expert) in [(1, 5), (0, 2)] {
                let mut stream = connect();
                let reply = ask(&mut stream, shape, layer, &[item(expert)]).unwrap();
                assert_eq!((reply.status, reply.items.len()), (FAILED, 0));
                assert!(is_closed(&mut stream));
            }
        });
    }
    // More than there is is refused when it starts.
    let options = WorkerOptions {
        dirs: vec![dir.path().to_owned()],
        held: HeldExperts { layers: 1..2, experts: 2..6 },
        ram_bytes: 400_000_000,
        process_bytes: 0,
        int8: true,
        io: None,
        read_limit: None,
        read_ahead: ReadAhead::Off,
        policy: Policy { key: None, plain: true },
    };
    let error = open(&options, compute_here()).err().unwrap().to_string();
    assert!(error.contains("experts.5."), "{error}");
}

#[test]
fn garbage_and_half_requests_end_their_connection_and_no_other() {
    let worker = worker("glm-dsa", Isa::detect(), Activations::Int8);
    let (shape, layer) = (worker.shape(), sparse_layer(&worker));
    let items = items(shape, 2);
    let mut limits = Limits::new(Limits::FREE_BYTES);
    limits.request_time = Duration::from_millis(200);
    let said = serving(worker, limits, |server, connect| {
        let mut good = connect();
        let mut dripping = connect();
        dripping.write_all(b"COLI").unwrap();
        let whole = request_bytes(shape, layer, &items);
        let mut huge = whole.clone();
        huge[32..36].copy_from_slice(&u32::to_be_bytes(65_536));
        let two = [&whole[..], &whole].concat();
        for bad in [&b"GET / HTTP/1.1\r\nHost: worker\r\n\r\n"[..], &[0; 64], &huge, &two] {
            let mut stream = connect();
            stream.write_all(bad).unwrap();
            assert!(is_closed(&mut stream));
        }
        let mut cut = connect();
        cut.write_all(&whole[..whole.len() - 1]).unwrap();
        cut.shutdown(Shutdown::Write).unwrap();
        assert!(is_closed(&mut cut));
        // The one that drips is closed by its deadline.
        assert!(is_closed(&mut dripping));
        assert_eq!(ask(&mut good, shape, layer, &items).unwrap().status, OK);
        assert_eq!(server.worker().counts().refused, 6);
    });
    for what in ["does not speak this protocol", "bytes of rows", "before the last", "too slow"] {
        assert!(said.iter().any(|said| said.contains(what)), "{what}: {said:?}");
    }
}

#[test]
fn rows_that_are_no_numbers_fail_their_request_and_the_worker_lives() {
    let worker = worker("olmoe-mha", Isa::detect(), Activations::Int8);
    let (shape, layer) = (worker.shape(), sparse_layer(&worker));
    let mut bad = items(shape, 4);
    bad[1].rows[3] = f32::NAN;
    serving(worker, Limits::new(1 << 20), |server, connect| {
        assert_eq!(ask(&mut connect(), shape, layer, &bad).unwrap().status, FAILED);
        let good = items(shape, 4);
        assert_eq!(ask(&mut connect(), shape, layer, &good).unwrap().status, OK);
        assert_eq!(server.worker().counts().failed, 1);
    });
}

#[test]
fn more_connections_than_allowed_are_closed_at_once() {
    let worker = worker("olmoe-mha", Isa::detect(), Activations::Int8);
    let (shape, layer) = (worker.shape(), sparse_layer(&worker));
    let mut limits = Limits::new(1 << 20);
    limits.connections = 2;
    serving(worker, limits, |_, connect| {
        let items = items(shape, 5);
        let mut open: Vec<TcpStream> = (0..2).map(|_| connect()).collect();
        for stream in &mut open {
            assert_eq!(ask(stream, shape, layer, &items).unwrap().status, OK);
        }
        assert!(is_closed(&mut connect()));
        drop(open.pop());
        // Its place is free once the worker has noticed.
        let mut next = std::iter::repeat_with(|| ask(&mut connect(), shape, layer, &items));
        assert!(next.by_ref().take(1000).any(|reply| reply.is_some()));
    });
}

/// Bytes of frames to a worker that takes plain connections, the greeting before them.
fn greeted(worker: &Worker, frames: &[u8]) -> Vec<u8> {
    let mut bytes = b"COLIEX01".to_vec();
    bytes.extend_from_slice(&2u32.to_be_bytes());
    bytes.extend_from_slice(&[0; 16]);
    put_frame(&mut bytes, Kind::Hello, 0, &greeting(&worker.welcome().facts, &Holdings::default()));
    bytes.extend_from_slice(frames);
    bytes
}

#[test]
fn a_worker_that_is_told_to_end_does_so_though_a_peer_always_begins_another_message() {
    let worker = worker("olmoe-mha", Isa::detect(), Activations::Int8);
    let mut ping = Vec::new();
    put_frame(&mut ping, Kind::Ping, 1, &[]);
    let first = greeted(&worker, &[&ping[..], &ping[..8]].concat());
    serving(worker, Limits::new(1 << 20), |server, connect| {
        let mut stream = connect();
        stream.write_all(&first).unwrap();
        // Preface, greeting and pong have come: the next ping has begun.
        let mut answer = vec![0; 16 + 16];
        stream.read_exact(&mut answer).unwrap();
        let hello = u32::from_le_bytes(answer[16..20].try_into().unwrap()) as usize;
        stream.read_exact(&mut vec![0; hello + 16 + 24]).unwrap();
        server.stop().stop();
        let next = [&ping[8..], &ping[..8]].concat();
        let mut rest = Vec::new();
        stream.write_all(&next).unwrap();
        stream.read_to_end(&mut rest).unwrap();
    });
}

#[test]
fn an_expert_whose_row_is_no_number_fails_alone() {
    let worker = worker("olmoe-mha", Isa::detect(), Activations::Int8);
    let (hidden, layer) = (worker.shape().hidden as usize, sparse_layer(&worker));
    let good = rows(3, hidden, 5);
    let mut bad = good.clone();
    bad[1] = f32::NAN;
    let request = |values: Vec<f32>, sums| Compute {
        layer,
        deadline_ms: 0,
        sums,
        experts: vec![(0, 1), (1, 2), (2, 4)],
        rows: vec![0, 1, 1, 2],
        weights: if sums { vec![0.5, 0.25, 2.0, 1.0] } else { Vec::new() },
        values,
    };
    for sums in [false, true] {
        let answer =
            worker.answer(&request(bad.clone(), sums), Instant::now(), || true, &mut |_| {});
        assert_eq!(answer.statuses, [Status::Numeric, Status::Computed, Status::Computed]);
        let whole =
            worker.answer(&request(good.clone(), sums), Instant::now(), || true, &mut |_| {});
        match (answer.outputs, whole.outputs) {
            (Outputs::Rows(some), Outputs::Rows(all)) => assert_eq!(some, all[hidden..]),
            // The first row is nobody's any more.
            (Outputs::Sums(some), Outputs::Sums(all)) => {
                assert_eq!(some[..hidden], vec![0; hidden]);
                assert_eq!(some[hidden..], all[hidden..]);
            }
            other => panic!("{other:?}"),
        }
    }
    // Late, and not wanted.
    let late = worker.answer(
        &Compute { deadline_ms: 1, ..request(good.clone(), false) },
        Instant::now().checked_sub(Duration::from_secs(1)).unwrap(),
        || true,
        &mut |_| {},
    );
    assert_eq!(late.statuses, [Status::Deadline; 3]);
    let unwanted = worker.answer(&request(good, false), Instant::now(), || false, &mut |_| {});
    assert_eq!(unwanted.statuses, [Status::Cancelled; 3]);
}

#[test]
fn a_peer_that_asks_for_ever_and_takes_nothing_is_ended() {
    let worker = worker("olmoe-mha", Isa::detect(), Activations::Int8);
    let mut pings = Vec::new();
    (0..4096).for_each(|id| put_frame(&mut pings, Kind::Ping, id, &[]));
    let first = greeted(&worker, &[]);
    let said = serving(worker, Limits::new(1 << 20), |_, connect| {
        let mut stream = connect();
        stream.write_all(&first).unwrap();
        // Far more than sockets hold.
        while stream.write_all(&pings).is_ok() {}
    });
    assert!(said.iter().any(|said| said.contains("does not take")), "{said:?}");
}
