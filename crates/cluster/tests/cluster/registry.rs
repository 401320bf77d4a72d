use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use cluster::coordinator::Discovery;
use cluster::registry::{
    BODY_BYTES_MAX, Client, ClientError, Registration, STALE_AFTER, ServerOptions, serve,
};
use cluster::wire::secure::Key;
use numerics::Isa;
use serde_json::{Map, Value, json};

use crate::coordinator::{Worker, coordinator_with, local, sum};
use crate::support::fixture;

/// A registry in this process, until the process ends.
fn registry(key: Option<&Key>) -> (SocketAddr, String) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    let token = key.map(Key::registry_token);
    let options = ServerOptions { stale_after: STALE_AFTER, token };
    thread::spawn(move || serve(listener, options).unwrap());
    (address, format!("http://{address}"))
}

fn record(address: &str) -> Map<String, Value> {
    let (host, port) = address.rsplit_once(':').unwrap();
    let port: u16 = port.parse().unwrap();
    let record = json!({ "node_id": address, "host": host, "port": port, "role": "expert" });
    record.as_object().unwrap().clone()
}

fn ids(client: &Client) -> Vec<String> {
    client.topology().unwrap().into_iter().map(|member| member.id).collect()
}

fn key(byte: u8) -> Key {
    let mut bytes = [byte; 32];
    bytes[0] = !byte;
    Key::new(bytes)
}

/// Waits for something that other threads do.
fn until(what: &str, done: impl Fn() -> bool) {
    let deadline = Instant::now() + Duration::from_secs(60);
    while !done() {
        assert!(Instant::now() < deadline, "{what} never came");
        thread::yield_now();
    }
}

#[test]
fn machines_register_say_that_they_are_there_and_go() {
    let (_, url) = registry(None);
    let client = Client::new(&url, None);
    assert!(ids(&client).is_empty());
    let unknown = client.heartbeat(&json!({ "node_id": "10.0.0.1:9100" }));
    assert!(matches!(unknown, Err(ClientError::Unknown { .. })), "{unknown:?}");
    for address in ["10.0.0.2:9100", "10.0.0.1:9100"] {
        client.register(&Value::Object(record(address))).unwrap();
    }
    client.heartbeat(&json!({ "node_id": "10.0.0.1:9100", "state": "draining" })).unwrap();
    assert_eq!(ids(&client), ["10.0.0.1:9100", "10.0.0.2:9100"]);
    assert_eq!(client.topology().unwrap()[0].record["state"], "draining");
    client.deregister("10.0.0.1:9100").unwrap();
    assert_eq!(ids(&client), ["10.0.0.2:9100"]);
}

#[test]
fn with_a_key_only_machines_that_have_it_see_or_change_the_list() {
    let (_, url) = registry(Some(&key(1)));
    Client::new(&url, Some(&key(1))).register(&Value::Object(record("10.0.0.1:9100"))).unwrap();
    for other in [None, Some(key(2))] {
        let client = Client::new(&url, other.as_ref());
        let refused = client.register(&Value::Object(record("10.0.0.9:9100"))).unwrap_err();
        assert!(refused.to_string().contains("--cluster-key"), "{refused}");
        assert!(client.topology().is_err());
    }
    assert_eq!(ids(&Client::new(&url, Some(&key(1)))), ["10.0.0.1:9100"]);
    // The token is not the key.
    assert_ne!(key(1).registry_token(), key(1).to_hex());
}

/// What a registry answers to bytes.
fn raw(address: SocketAddr, request: &[u8]) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
    // It may have answered before all of it was sent.
    let _ = stream.write_all(request);
    let mut answer = Vec::new();
    let _ = stream.read_to_end(&mut answer);
    String::from_utf8_lossy(&answer).into_owned()
}

#[test]
fn requests_that_are_none_are_answered_and_change_nothing() {
    let (address, url) = registry(None);
    let post = |path: &str, body: &str| {
        let length = body.len();
        format!(
            "POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\
             content-length: {length}\r\n\r\n{body}"
        )
    };
    let big = " ".repeat(BODY_BYTES_MAX + 1);
    for (request, status) in [
        (post("/v1/cluster/register", "{"), "400"),
        (post("/v1/cluster/register", &big), "413"),
        (post("/v1/cluster/register", "{\"node_id\":7}"), "400"),
        (post("/v1/cluster/heartbeat", "{\"node_id\":7}"), "404"),
        (post("/v1/cluster/topology", "{}"), "405"),
        (post("/other", "{}"), "404"),
        ("GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n".to_owned(), "200"),
        ("\0\0\0 nothing".to_owned(), "400"),
    ] {
        let answer = raw(address, request.as_bytes());
        assert!(answer.starts_with(&format!("HTTP/1.1 {status}")), "{status}: {answer}");
    }
    assert!(ids(&Client::new(&url, None)).is_empty());
}

#[test]
fn a_worker_registers_again_with_a_registry_that_has_forgotten_it() {
    let (_, url) = registry(None);
    let client = Client::new(&url, None);
    let said = Arc::new(Mutex::new(Vec::new()));
    let notes = said.clone();
    let registration = Registration::start(
        client.clone(),
        Duration::from_millis(10),
        record("10.0.0.1:9100"),
        || json!({ "state": "ready" }).as_object().unwrap().clone(),
        Arc::new(move |text: &str| notes.lock().unwrap().push(text.to_owned())),
    )
    .unwrap();
    until("the worker", || !ids(&client).is_empty());
    // As when it was restarted.
    client.deregister("10.0.0.1:9100").unwrap();
    until("the worker again", || !ids(&client).is_empty());
    assert_eq!(client.topology().unwrap()[0].record["state"], "ready");
    drop(registration);
    assert!(ids(&client).is_empty());
    assert!(said.lock().unwrap().iter().all(|said| said.contains("registered with")));
}

#[test]
fn a_worker_lives_with_registries_that_say_400_to_strangers_and_take_no_goodbye() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let asked = Arc::new(Mutex::new(Vec::new()));
    let paths = asked.clone();
    thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.unwrap();
            let mut bytes = vec![0; 1 << 16];
            let mut have = 0;
            while !String::from_utf8_lossy(&bytes[..have]).contains("\r\n\r\n{") {
                have += stream.read(&mut bytes[have..]).unwrap();
            }
            let text = String::from_utf8_lossy(&bytes[..have]).into_owned();
            let path = text.split(' ').nth(1).unwrap_or_default().to_owned();
            let status =
                if path.ends_with("register") && !path.ends_with("deregister") { 200 } else { 400 };
            paths.lock().unwrap().push(path);
            let answer = format!(
                "HTTP/1.1 {status} X\r\ncontent-length: 2\r\nconnection: close\r\n\r\n{{}}"
            );
            stream.write_all(answer.as_bytes()).unwrap();
        }
    });
    let registration = Registration::start(
        Client::new(&url, None),
        Duration::from_millis(10),
        record("10.0.0.1:9100"),
        Map::new,
        Arc::new(|_: &str| {}),
    )
    .unwrap();
    let count = |what: &str| asked.lock().unwrap().iter().filter(|p| p.ends_with(what)).count();
    until("three registrations", || count("/register") >= 3);
    drop(registration);
    assert!(count("/heartbeat") >= 2 && count("/deregister") == 1);
}

#[test]
fn a_coordinator_uses_workers_that_are_listed_later_and_none_that_may_not_be_used() {
    let (_, url) = registry(None);
    let client = Client::new(&url, None);
    let refused = "10.99.0.1:9100";
    let allow = move |name: &str| match name == refused {
        true => Err("it is elsewhere".to_owned()),
        false => Ok(()),
    };
    let discovery = Discovery::new(client.clone(), Duration::from_millis(20), allow);
    let (cluster, config, said) = coordinator_with("glm-dsa", &[], Some(discovery), |_| {});
    let (_, alone) = local("glm-dsa");
    let same = |seed| {
        assert_eq!(sum(&cluster, &config, 9, seed), sum(&alone, &config, 9, seed));
    };
    same(1);
    assert_eq!((cluster.rows().remote, cluster.peers().len()), (0, 0));
    let worker = Worker::start(&fixture("glm-dsa"), Isa::detect());
    client.register(&Value::Object(record(&worker.address))).unwrap();
    client.register(&Value::Object(record(refused))).unwrap();
    let mut dense = record("127.0.0.1:9");
    dense.insert("role".to_owned(), json!("dense"));
    client.register(&Value::Object(dense)).unwrap();
    until("the worker", || said.lock().unwrap().iter().any(|said| said.contains("is ready")));
    same(2);
    assert_eq!(cluster.rows().remote, 18);
    assert_eq!(cluster.peers().len(), 1);
    until("the refusal", || said.lock().unwrap().iter().any(|s| s.contains("it is elsewhere")));
}
