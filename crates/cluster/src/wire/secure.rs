//! The outermost layer of version 2: a preface by which both sides agree on encryption, then either
//! plain bytes or Noise messages.
//!
//! ```text
//! coordinator: "COLIEX01" u32be 2  security u8  15 × 0
//! worker:      "COLIEX01" u32be 2  security u8  status u8  0 0
//! ```
//!
//! The coordinator's is as long as the head of a request of version 1, so that a worker of that
//! version ends the connection rather than wait for more.
//!
//! With encryption both prefaces are the prologue of `Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s`, and
//! every Noise message has its length before it, u16 big-endian. A length of 0 in place of the
//! worker's handshake message means that the keys differ.

use std::fmt;
use std::str::FromStr;

use container::hex;
use snow::{Builder, HandshakeState, TransportState};

use super::incoming::Part;
use super::{MAGIC, WireError};

/// Version of the protocol inside.
pub const VERSION: u32 = 2;
/// Bytes of a coordinator's preface.
pub const COORDINATOR_PREFACE: usize = 28;
/// Bytes of a worker's preface.
pub const WORKER_PREFACE: usize = 16;
/// Bytes of it that tell the version.
pub const VERSION_BYTES: usize = 12;
/// Longest Noise message, and the bytes of its tag.
const MESSAGE_MAX: usize = 65_535;
const TAG_BYTES: usize = 16;
const PATTERN: &str = "Noise_NNpsk0_25519_ChaChaPoly_BLAKE2s";

/// Security asked for in a preface.
const PLAIN: u8 = 0;
const NOISE: u8 = 1;
/// Status of a worker's preface.
const OK: u8 = 0;
const KEY_NEEDED: u8 = 1;
const NO_KEY: u8 = 2;

/// The key that all machines of a cluster share.
#[derive(Clone, PartialEq, Eq)]
pub struct Key([u8; 32]);

impl Key {
    /// A key of these bytes, which nobody else knows.
    pub const fn new(bytes: [u8; 32]) -> Key {
        Key(bytes)
    }

    /// A key that nobody knows yet.
    pub fn generate() -> Result<Key, getrandom::Error> {
        let mut bytes = [0; 32];
        getrandom::fill(&mut bytes)?;
        Ok(Key(bytes))
    }

    /// The key as its file has it: 64 hexadecimal digits.
    pub fn to_hex(&self) -> String {
        hex::encode(&self.0)
    }

    /// The token by which a registry knows its cluster; the key cannot be had from it.
    pub fn registry_token(&self) -> String {
        hex::encode(&blake3::derive_key("colibri registry v1", &self.0))
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Key(..)")
    }
}

impl FromStr for Key {
    type Err = &'static str;

    /// 64 hexadecimal digits; white space around them is ignored.
    fn from_str(text: &str) -> Result<Key, &'static str> {
        let key = hex::decode(text.trim()).and_then(|bytes| <[u8; 32]>::try_from(bytes).ok());
        let key = key.ok_or("must be 64 hexadecimal digits")?;
        if key.iter().all(|byte| *byte == key[0]) {
            return Err("is one byte repeated, which anybody can guess");
        }
        Ok(Key(key))
    }
}

/// What a side takes.
#[derive(Clone, Debug)]
pub struct Policy {
    /// The key; a coordinator that has one never speaks plainly.
    pub key: Option<Key>,
    /// Whether a worker takes plain connections.
    pub plain: bool,
}

/// Why a channel did not open, or is of no more use.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum ChannelError {
    /// Not this protocol.
    #[error(transparent)]
    Wire(#[from] WireError),
    /// The worker takes encrypted connections only.
    #[error("the worker asks for encryption; give its --cluster-key here too")]
    KeyNeeded,
    /// The worker has no key.
    #[error("the worker has no key; give it this side's --cluster-key")]
    NoKeyThere,
    /// Encryption is asked for and there is no key here.
    #[error("the coordinator asks for encryption; give its --cluster-key here too")]
    NoKeyHere,
    /// A plain connection where only encrypted ones are taken.
    #[error("the coordinator does not encrypt; give this side's --cluster-key there too")]
    PlainRefused,
    /// The keys differ.
    #[error("the two sides have different --cluster-key files")]
    OtherKey,
    /// A message was changed on its way, or is none.
    #[error("an encrypted message is damaged")]
    Damaged,
    /// The cryptography could not be set up.
    #[error("encryption failed: {0}")]
    Crypto(String),
}

/// A Noise message that comes.
#[derive(Debug, Default)]
struct Coming {
    length: Part<2>,
    left: Option<usize>,
    bytes: Vec<u8>,
}

impl Coming {
    /// Takes bytes from the front of `input`; true once a message is complete in `self.bytes`.
    fn take(&mut self, input: &mut &[u8]) -> bool {
        let left = match &mut self.left {
            Some(left) => left,
            None => {
                let Some(length) = self.length.take(input) else { return false };
                self.bytes.clear();
                self.left.insert(usize::from(u16::from_be_bytes(length)))
            }
        };
        let (taken, rest) = input.split_at((*left).min(input.len()));
        self.bytes.extend_from_slice(taken);
        *input = rest;
        *left -= taken.len();
        if *left > 0 {
            return false;
        }
        self.left = None;
        true
    }
}

#[derive(Debug)]
enum State {
    /// Bytes of the other side's preface so far.
    Preface(Vec<u8>),
    Handshake(Box<HandshakeState>),
    Plain,
    Sealed(Box<TransportState>),
    Failed,
}

/// One side of a connection, without its socket.
#[derive(Debug)]
pub struct Channel {
    is_worker: bool,
    policy: Policy,
    state: State,
    coming: Coming,
    outgoing: Vec<u8>,
}

fn preface<const N: usize>(security: u8, status: u8) -> [u8; N] {
    let mut bytes = [0; N];
    bytes[..8].copy_from_slice(&MAGIC);
    bytes[8..12].copy_from_slice(&VERSION.to_be_bytes());
    (bytes[12], bytes[13]) = (security, status);
    bytes
}

/// The version that the first bytes of a connection name.
pub fn version_of(first: &[u8; VERSION_BYTES]) -> Result<u32, WireError> {
    let (magic, version) = first.split_at(MAGIC.len());
    if magic != MAGIC {
        return Err(WireError::Magic { found: magic.first_chunk().copied().unwrap_or_default() });
    }
    Ok(version.first_chunk().map_or(0, |four| u32::from_be_bytes(*four)))
}

fn crypto(error: snow::Error) -> ChannelError {
    ChannelError::Crypto(error.to_string())
}

impl Channel {
    /// The side that opens a connection; encrypted where there is a key.
    pub fn coordinator(key: Option<Key>) -> Channel {
        let plain = key.is_none();
        let security = if plain { PLAIN } else { NOISE };
        Channel {
            is_worker: false,
            policy: Policy { key, plain },
            state: State::Preface(Vec::new()),
            coming: Coming::default(),
            outgoing: preface::<COORDINATOR_PREFACE>(security, OK).to_vec(),
        }
    }

    /// The side that is asked.
    pub fn worker(policy: Policy) -> Channel {
        Channel {
            is_worker: true,
            policy,
            state: State::Preface(Vec::new()),
            coming: Coming::default(),
            outgoing: Vec::new(),
        }
    }

    /// Whether some of an encrypted message has come, and not all.
    pub fn is_begun(&self) -> bool {
        self.coming.left.is_some() || self.coming.length.is_begun()
    }

    /// Whether both sides have agreed and messages can be sent.
    pub fn is_open(&self) -> bool {
        matches!(self.state, State::Plain | State::Sealed(_))
    }

    /// Bytes to send to the other side; also after an error, which they may explain.
    pub fn take_outgoing(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outgoing)
    }

    /// Takes bytes of the other side, and appends what they say to `plain`. After an error the
    /// channel is of no more use.
    pub fn receive(&mut self, mut input: &[u8], plain: &mut Vec<u8>) -> Result<(), ChannelError> {
        let received = self.take(&mut input, plain);
        if received.is_err() {
            self.state = State::Failed;
        }
        received
    }

    fn take(&mut self, input: &mut &[u8], plain: &mut Vec<u8>) -> Result<(), ChannelError> {
        while !input.is_empty() {
            match &mut self.state {
                State::Preface(bytes) => {
                    let whole = if self.is_worker { COORDINATOR_PREFACE } else { WORKER_PREFACE };
                    let (taken, rest) = input.split_at((whole - bytes.len()).min(input.len()));
                    bytes.extend_from_slice(taken);
                    *input = rest;
                    if bytes.len() < whole {
                        return Ok(());
                    }
                    let theirs = std::mem::take(bytes);
                    self.agree(&theirs)?;
                }
                State::Handshake(_) => {
                    if !self.coming.take(input) {
                        return Ok(());
                    }
                    self.shake()?;
                }
                State::Plain => {
                    plain.extend_from_slice(input);
                    *input = &[];
                }
                State::Sealed(noise) => {
                    if !self.coming.take(input) {
                        return Ok(());
                    }
                    let start = plain.len();
                    plain.resize(start + self.coming.bytes.len(), 0);
                    let read = noise.read_message(&self.coming.bytes, &mut plain[start..]);
                    let read = read.map_err(|_| ChannelError::Damaged)?;
                    plain.truncate(start + read);
                }
                State::Failed => return Err(ChannelError::Damaged),
            }
        }
        Ok(())
    }

    /// The other side's preface has come.
    fn agree(&mut self, theirs: &[u8]) -> Result<(), ChannelError> {
        let version = version_of(theirs.first_chunk().unwrap_or(&[0; VERSION_BYTES]))?;
        if version != VERSION {
            return Err(WireError::Version { found: version, wanted: VERSION }.into());
        }
        let (security, status) = (theirs[12], theirs[13]);
        let prologue: Vec<u8> = if self.is_worker {
            let (status, refused) = match (security, &self.policy.key, self.policy.plain) {
                (PLAIN, _, true) | (NOISE, Some(_), _) => (OK, None),
                (PLAIN, _, false) => (KEY_NEEDED, Some(ChannelError::PlainRefused)),
                (NOISE, None, _) => (NO_KEY, Some(ChannelError::NoKeyHere)),
                (found, _, _) => {
                    let (found, most) = (u32::from(found), u32::from(NOISE));
                    let field = "the security";
                    return Err(WireError::Range { field, found, least: 0, most }.into());
                }
            };
            let ours = preface::<WORKER_PREFACE>(security, status);
            self.outgoing.extend_from_slice(&ours);
            if let Some(refused) = refused {
                return Err(refused);
            }
            [theirs, &ours].concat()
        } else {
            let asked = if self.policy.key.is_some() { NOISE } else { PLAIN };
            match status {
                OK if security == asked => {
                    [&preface::<COORDINATOR_PREFACE>(asked, OK)[..], theirs].concat()
                }
                KEY_NEEDED => return Err(ChannelError::KeyNeeded),
                NO_KEY => return Err(ChannelError::NoKeyThere),
                _ => return Err(ChannelError::Damaged),
            }
        };
        let Some(key) = self.policy.key.as_ref().filter(|_| security == NOISE) else {
            self.state = State::Plain;
            return Ok(());
        };
        let pattern = PATTERN.parse().map_err(crypto)?;
        let builder = Builder::new(pattern).psk(0, &key.0).map_err(crypto)?;
        let builder = builder.prologue(&prologue).map_err(crypto)?;
        let noise = if self.is_worker {
            builder.build_responder().map_err(crypto)?
        } else {
            builder.build_initiator().map_err(crypto)?
        };
        self.state = State::Handshake(Box::new(noise));
        if self.is_worker { Ok(()) } else { self.put_handshake() }
    }

    /// Appends this side's message of the handshake.
    fn put_handshake(&mut self) -> Result<(), ChannelError> {
        let State::Handshake(noise) = &mut self.state else { return Ok(()) };
        let mut message = [0; 256];
        let length = noise.write_message(&[], &mut message).map_err(crypto)?;
        self.outgoing.extend_from_slice(&(length as u16).to_be_bytes());
        self.outgoing.extend_from_slice(&message[..length]);
        Ok(())
    }

    /// The other side's message of the handshake is in `self.coming`.
    fn shake(&mut self) -> Result<(), ChannelError> {
        let State::Handshake(noise) = &mut self.state else { return Ok(()) };
        // Nothing but tags and keys is in it.
        let mut nothing = [0; MESSAGE_MAX];
        if noise.read_message(&self.coming.bytes, &mut nothing).is_err() {
            if self.is_worker {
                self.outgoing.extend_from_slice(&[0, 0]);
            }
            return Err(ChannelError::OtherKey);
        }
        if self.is_worker {
            self.put_handshake()?;
        }
        if let State::Handshake(noise) = std::mem::replace(&mut self.state, State::Failed) {
            self.state = State::Sealed(Box::new(noise.into_transport_mode().map_err(crypto)?));
        }
        Ok(())
    }

    /// Appends bytes for the other side to what is to be sent. The channel is open.
    pub fn send(&mut self, plain: &[u8]) -> Result<(), ChannelError> {
        match &mut self.state {
            State::Plain => self.outgoing.extend_from_slice(plain),
            State::Sealed(noise) => {
                for piece in plain.chunks(MESSAGE_MAX - TAG_BYTES) {
                    let start = self.outgoing.len();
                    let length = piece.len() + TAG_BYTES;
                    self.outgoing.extend_from_slice(&(length as u16).to_be_bytes());
                    self.outgoing.resize(start + 2 + length, 0);
                    let message = &mut self.outgoing[start + 2..];
                    noise.write_message(piece, message).map_err(crypto)?;
                }
            }
            _ => return Err(ChannelError::Crypto("the channel is not open".to_owned())),
        }
        Ok(())
    }
}
