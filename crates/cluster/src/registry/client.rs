//! What machines ask of a registry.

use std::time::Duration;

use serde_json::{Value, json};
use ureq::Agent;

use crate::session::shown;
use crate::wire::secure::Key;

/// Time for a request.
const REQUEST_TIME: Duration = Duration::from_secs(5);
/// Most bytes of an answer: as many machines as a registry takes.
const ANSWER_BYTES_MAX: u64 = 64 << 20;

/// Why a registry did not do what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ClientError {
    /// It cannot be reached, or does not speak HTTP.
    #[error("the registry {url}: {why}")]
    Http {
        /// Its address.
        url: String,
        /// What happened.
        why: String,
    },
    /// It does not know the machine, which must register again. Some registries say 400 to that.
    #[error("the registry {url} does not know this machine")]
    Unknown {
        /// Its address.
        url: String,
    },
    /// It refuses.
    #[error("the registry {url} refuses: {status}, {why}")]
    Refused {
        /// Its address.
        url: String,
        /// Status of its answer.
        status: u16,
        /// What it says.
        why: String,
    },
}

/// A machine of the list.
#[derive(Clone, PartialEq, Debug)]
pub struct Member {
    /// Its id.
    pub id: String,
    /// Where it is, `host:port`.
    pub address: String,
    /// What it does.
    pub role: String,
    /// All that it says of itself.
    pub record: Value,
}

/// A registry, as other machines see it.
#[derive(Clone, Debug)]
pub struct Client {
    agent: Agent,
    url: String,
    token: Option<String>,
}

impl Client {
    /// The registry at an address such as `http://10.0.0.1:8765`.
    pub fn new(url: &str, key: Option<&Key>) -> Client {
        let config = Agent::config_builder()
            .timeout_global(Some(REQUEST_TIME))
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None)
            .build();
        Client {
            agent: config.into(),
            url: url.trim_end_matches('/').to_owned(),
            token: key.map(Key::registry_token),
        }
    }

    /// Its address.
    pub fn url(&self) -> &str {
        &self.url
    }

    /// Says what this machine is: `node_id`, `host`, `port`, `role` and more.
    pub fn register(&self, record: &Value) -> Result<(), ClientError> {
        self.post("register", record).map(|_| ())
    }

    /// Says that this machine is still there, and what has changed.
    pub fn heartbeat(&self, said: &Value) -> Result<(), ClientError> {
        match self.post("heartbeat", said) {
            Err(ClientError::Refused { status: 400 | 404, .. }) => {
                Err(ClientError::Unknown { url: self.url.clone() })
            }
            other => other.map(|_| ()),
        }
    }

    /// Says that this machine goes. A registry that does not know how to take that is no matter.
    pub fn deregister(&self, id: &str) -> Result<(), ClientError> {
        self.post("deregister", &json!({ "node_id": id })).map(|_| ())
    }

    /// The machines, without those that are not described as they must be.
    pub fn topology(&self) -> Result<Vec<Member>, ClientError> {
        let mut request = self.agent.get(format!("{}/v1/cluster/topology", self.url));
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        let body = self.read(request.call())?;
        let nodes = body["nodes"].as_array().map_or(&[][..], |nodes| &nodes[..]);
        Ok(nodes.iter().filter_map(member).collect())
    }

    fn post(&self, what: &str, body: &Value) -> Result<Value, ClientError> {
        let url = format!("{}/v1/cluster/{what}", self.url);
        let mut request = self.agent.post(url).header("content-type", "application/json");
        if let Some(token) = &self.token {
            request = request.header("authorization", format!("Bearer {token}"));
        }
        self.read(request.send(body.to_string().as_bytes()))
    }

    fn read(
        &self,
        answer: Result<ureq::http::Response<ureq::Body>, ureq::Error>,
    ) -> Result<Value, ClientError> {
        let http = |error: ureq::Error| {
            let why = match error {
                ureq::Error::Io(error) => error.to_string(),
                other => other.to_string(),
            };
            ClientError::Http { url: self.url.clone(), why }
        };
        let mut answer = answer.map_err(http)?;
        let status = answer.status().as_u16();
        let body = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_vec();
        let body: Value = serde_json::from_slice(&body.map_err(http)?).unwrap_or(Value::Null);
        if status == 200 {
            return Ok(body);
        }
        let why = body["error"].as_str().unwrap_or("no reason given");
        let why = shown(why, 200);
        Err(ClientError::Refused { url: self.url.clone(), status, why })
    }
}

/// A machine as a registry describes it.
fn member(record: &Value) -> Option<Member> {
    let id = match &record["node_id"] {
        Value::String(id) => id.clone(),
        Value::Number(id) => id.to_string(),
        _ => return None,
    };
    let (host, role) = (record["host"].as_str()?, record["role"].as_str()?);
    let port = record["port"].as_u64().filter(|port| (1..=65_535).contains(port))?;
    if host.is_empty() || !host.chars().all(|c| c.is_ascii_graphic()) {
        return None;
    }
    let is_v6 = host.contains(':') && !host.starts_with('[');
    let address = if is_v6 { format!("[{host}]:{port}") } else { format!("{host}:{port}") };
    let (id, role) = (shown(&id, 255), shown(role, 64));
    Some(Member { id, address, role, record: record.clone() })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn machines_that_are_not_described_as_they_must_be_are_left_out() {
        let fine = json!({ "node_id": 3, "host": "::1", "port": 9100, "role": "expert", "x": 1 });
        let found = member(&fine).unwrap();
        assert_eq!((&found.id[..], &found.address[..]), ("3", "[::1]:9100"));
        for (field, value) in [
            ("node_id", json!(null)),
            ("host", json!("a b")),
            ("host", json!("")),
            ("port", json!(0)),
            ("port", json!("9100")),
            ("role", json!(7)),
        ] {
            let mut other = fine.clone();
            other[field] = value;
            assert_eq!(member(&other), None, "{other}");
        }
    }
}
