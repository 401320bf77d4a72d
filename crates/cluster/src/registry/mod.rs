//! Who is in the cluster: machines say that they are there, and coordinators ask for the list.
//!
//! HTTP with JSON, as existing peers speak it. The registry is believed in nothing that matters: a
//! coordinator compares every worker itself.

mod client;
mod registration;
mod server;

use std::collections::BTreeMap;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use serde_json::{Map, Value, json};

pub use client::{Client, ClientError, Member};
pub use registration::Registration;
pub use server::{ServerOptions, serve};

/// Version of this interface.
pub const PROTOCOL_VERSION: u32 = 1;
/// Most machines of a cluster.
pub const NODES_MAX: usize = 1024;
/// Most bytes of a request, and of all that a machine says of itself.
pub const BODY_BYTES_MAX: usize = 16 << 10;
/// Most characters of an id or a host.
const NAME_CHARS_MAX: usize = 255;
/// Rest between two signs of life of a machine.
pub const HEARTBEAT_EVERY: Duration = Duration::from_secs(10);
/// Time after which a machine without a sign of life is taken off the list.
pub const STALE_AFTER: Duration = Duration::from_secs(30);

/// Why a request is refused.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Refusal {
    /// It is not what it must be.
    #[error("{0}")]
    Bad(String),
    /// No machine of this id is known; it registers again.
    #[error("node {0:?} is not registered; register again")]
    Unknown(String),
    /// There are too many.
    #[error("{NODES_MAX} nodes are registered already")]
    Full,
}

/// A machine that is known.
#[derive(Clone, Debug)]
struct Node {
    /// Everything it said of itself.
    record: Map<String, Value>,
    role: String,
    heard: Instant,
    /// Seconds since 1970.
    last_seen: f64,
}

/// The machines of a cluster.
#[derive(Debug)]
pub struct Registry {
    nodes: BTreeMap<String, Node>,
    stale_after: Duration,
}

/// An id of text or of a number, as text.
fn id_of(body: &Map<String, Value>) -> Result<String, Refusal> {
    let id = match body.get("node_id") {
        Some(Value::String(id)) => id.clone(),
        Some(Value::Number(id)) => id.to_string(),
        _ => return Err(Refusal::Bad("node_id must be text or a number".to_owned())),
    };
    named("node_id", id)
}

fn named(field: &str, text: String) -> Result<String, Refusal> {
    let is_fine = (1..=NAME_CHARS_MAX).contains(&text.chars().count())
        && !text.chars().any(|c| c.is_control() || c.is_whitespace());
    match is_fine {
        true => Ok(text),
        false => Err(Refusal::Bad(format!(
            "{field} must have 1 to {NAME_CHARS_MAX} characters, no white space among them"
        ))),
    }
}

fn object(body: &[u8]) -> Result<Map<String, Value>, Refusal> {
    match serde_json::from_slice(body) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Refusal::Bad("the body must be a JSON object".to_owned())),
        Err(error) => Err(Refusal::Bad(format!("the body is not JSON: {error}"))),
    }
}

impl Registry {
    /// A registry without machines, which forgets those that say nothing for so long.
    pub fn new(stale_after: Duration) -> Registry {
        Registry { nodes: BTreeMap::new(), stale_after }
    }

    fn forget_stale(&mut self, now: Instant) {
        let stale_after = self.stale_after;
        self.nodes.retain(|_, node| now.saturating_duration_since(node.heard) <= stale_after);
    }

    /// A machine says what it is: the body of the request. Returns its record.
    pub fn register(&mut self, body: &[u8], now: Instant) -> Result<Value, Refusal> {
        self.forget_stale(now);
        let mut record = object(body)?;
        let id = id_of(&record)?;
        let bad = |what: &str| Refusal::Bad(what.to_owned());
        let text = |field: &str| record.get(field).and_then(Value::as_str).map(str::to_owned);
        let role = text("role").ok_or(bad("role must be expert, dense or coordinator"))?;
        if !["expert", "dense", "coordinator"].contains(&&role[..]) {
            return Err(bad("role must be expert, dense or coordinator"));
        }
        let host = text("host").ok_or(bad("host must be text"))?;
        named("host", host)?;
        let port = record.get("port").and_then(Value::as_u64);
        if !port.is_some_and(|port| (1..=65_535).contains(&port)) {
            return Err(bad("port must be a number from 1 to 65535"));
        }
        if !self.nodes.contains_key(&id) && self.nodes.len() >= NODES_MAX {
            return Err(Refusal::Full);
        }
        record.insert("node_id".to_owned(), Value::String(id.clone()));
        let node = Node { record, role, heard: now, last_seen: unix_s() };
        let shown = node.shown();
        self.nodes.insert(id, node);
        Ok(shown)
    }

    /// A machine is still there; what it says of itself besides replaces what it said. Returns its
    /// record.
    pub fn heartbeat(&mut self, body: &[u8], now: Instant) -> Result<Value, Refusal> {
        self.forget_stale(now);
        let said = object(body)?;
        let id = id_of(&said)?;
        let node = self.nodes.get_mut(&id).ok_or(Refusal::Unknown(id))?;
        // Where it is and what it does is said when it registers.
        let fixed = ["node_id", "host", "port", "role"];
        let mut record = node.record.clone();
        record.extend(said.into_iter().filter(|(name, _)| !fixed.contains(&&name[..])));
        let bytes = serde_json::to_string(&record).map_or(usize::MAX, |text| text.len());
        if bytes > BODY_BYTES_MAX {
            return Err(Refusal::Bad(format!("a record has at most {BODY_BYTES_MAX} bytes")));
        }
        (node.record, node.heard, node.last_seen) = (record, now, unix_s());
        Ok(node.shown())
    }

    /// A machine goes. Returns whether it was known.
    pub fn deregister(&mut self, body: &[u8], now: Instant) -> Result<Value, Refusal> {
        self.forget_stale(now);
        let id = id_of(&object(body)?)?;
        match self.nodes.remove(&id) {
            Some(_) => Ok(json!({ "protocol_version": PROTOCOL_VERSION, "node_id": id })),
            None => Err(Refusal::Unknown(id)),
        }
    }

    /// All machines, by role and id.
    pub fn topology(&mut self, now: Instant) -> Value {
        self.forget_stale(now);
        let mut nodes: Vec<(&String, &String, &Node)> =
            self.nodes.iter().map(|(id, node)| (&node.role, id, node)).collect();
        nodes.sort_by_key(|(role, id, _)| (*role, *id));
        let nodes: Vec<Value> = nodes.into_iter().map(|(_, _, node)| node.shown()).collect();
        json!({ "protocol_version": PROTOCOL_VERSION, "nodes": nodes })
    }
}

impl Node {
    fn shown(&self) -> Value {
        let mut record = self.record.clone();
        record.insert("protocol_version".to_owned(), json!(PROTOCOL_VERSION));
        record.insert("last_seen".to_owned(), json!(self.last_seen));
        Value::Object(record)
    }
}

/// Seconds since 1970.
fn unix_s() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |time| time.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(id: Value, role: &str) -> Vec<u8> {
        let body =
            json!({ "node_id": id, "host": "10.0.0.7", "port": 9100, "role": role, "ram": 5 });
        body.to_string().into_bytes()
    }

    fn ids(topology: &Value) -> Vec<&str> {
        let nodes = topology["nodes"].as_array().unwrap();
        nodes.iter().map(|node| node["node_id"].as_str().unwrap()).collect()
    }

    #[test]
    fn machines_are_listed_by_role_and_id_whatever_the_type_of_the_id() {
        let (mut registry, now) = (Registry::new(STALE_AFTER), Instant::now());
        for (id, role) in [
            (json!("b"), "expert"),
            (json!(12), "expert"),
            (json!("a"), "dense"),
            (json!("z"), "coordinator"),
        ] {
            let record = registry.register(&body(id, role), now).unwrap();
            assert_eq!((&record["protocol_version"], &record["ram"]), (&json!(1), &json!(5)));
            assert!(record["last_seen"].as_f64() > Some(1e9));
        }
        let topology = registry.topology(now);
        assert_eq!(topology["protocol_version"], 1);
        assert_eq!(ids(&topology), ["z", "a", "12", "b"]);
    }

    #[test]
    fn a_machine_that_says_nothing_vanishes_and_must_register_again() {
        let (mut registry, start) = (Registry::new(STALE_AFTER), Instant::now());
        registry.register(&body(json!("a"), "expert"), start).unwrap();
        registry.register(&body(json!("b"), "expert"), start).unwrap();
        let at = |seconds| start + Duration::from_secs(seconds);
        let beat = br#"{"node_id":"a","state":"draining","host":"10.9.9.9"}"#;
        let record = registry.heartbeat(beat, at(25)).unwrap();
        assert_eq!((&record["state"], &record["host"]), (&json!("draining"), &json!("10.0.0.7")));
        assert_eq!(ids(&registry.topology(at(31))), ["a"]);
        let gone = registry.heartbeat(br#"{"node_id":"b"}"#, at(32));
        assert_eq!(gone, Err(Refusal::Unknown("b".to_owned())));
        registry.deregister(beat, at(33)).unwrap();
        assert!(ids(&registry.topology(at(33))).is_empty());
        assert!(registry.deregister(beat, at(33)).is_err());
    }

    #[test]
    fn what_is_no_machine_is_refused_and_changes_nothing() {
        let (mut registry, now) = (Registry::new(STALE_AFTER), Instant::now());
        let long = "x".repeat(300);
        for body in [
            "",
            "[]",
            "7",
            "{",
            "{}",
            r#"{"node_id":"a"}"#,
            r#"{"node_id":"a","host":"h","port":9100,"role":"king"}"#,
            r#"{"node_id":"a","host":"h","port":0,"role":"expert"}"#,
            r#"{"node_id":"a","host":"h","port":"9100","role":"expert"}"#,
            r#"{"node_id":"a","host":"h h","port":9100,"role":"expert"}"#,
            r#"{"node_id":"a\u001b[2J","host":"h","port":9100,"role":"expert"}"#,
            r#"{"node_id":["a"],"host":"h","port":9100,"role":"expert"}"#,
            &format!(r#"{{"node_id":"{long}","host":"h","port":9100,"role":"expert"}}"#),
        ] {
            assert!(
                matches!(registry.register(body.as_bytes(), now), Err(Refusal::Bad(_))),
                "{body}"
            );
        }
        assert!(ids(&registry.topology(now)).is_empty());
        for at in 0..NODES_MAX {
            registry.register(&body(json!(at), "expert"), now).unwrap();
        }
        assert_eq!(registry.register(&body(json!("more"), "expert"), now), Err(Refusal::Full));
        registry.register(&body(json!(5), "expert"), now).unwrap();
    }
}
