//! The worker's side of a connection, of either version.

use std::sync::Arc;

use super::{SessionError, out_of_order, refusal};
use crate::identity::{FACTS_BYTES_MAX, Facts, facts_of};
use crate::wire::secure::{Channel, Policy, VERSION as V2, VERSION_BYTES, version_of};
use crate::wire::v1::{self, RequestReader};
use crate::wire::v2::{
    Answer, Budgets, Compute, FRAME_HEAD, Frame, FrameReader, Kind, Load, put_frame,
};
use crate::wire::{Shape, WireError};

/// What a worker tells every peer, and what it takes.
#[derive(Clone, Debug)]
pub struct Welcome {
    /// What it is.
    pub facts: Facts,
    /// Its greeting: facts and holdings.
    pub greeting: Vec<u8>,
    /// Shape of the model.
    pub shape: Shape,
    /// Most bytes of rows of a request, and of its outputs.
    pub request_bytes: u64,
    /// Encryption.
    pub policy: Policy,
}

impl Welcome {
    /// Most bytes of a request's body: rows, and all that says whose they are.
    fn compute_bytes(&self) -> u64 {
        // At least one row for whatever is named.
        let rows = self.request_bytes / (u64::from(self.shape.hidden) * 4).max(1);
        self.request_bytes + 64 + rows * 16
    }
}

/// What a peer wants.
#[derive(Debug, PartialEq)]
pub enum Wish {
    /// A peer of version 2 is what it must be.
    Greeted(Box<Facts>),
    /// A request of version 1, to be answered before another comes.
    V1(v1::Request),
    /// A request.
    Compute {
        /// Its id.
        id: u64,
        /// What is asked.
        request: Box<Compute>,
    },
    /// The answer to a request is not wanted any more.
    Cancel(u64),
    /// Whether anybody is there.
    Ping(u64),
}

enum State {
    /// The version is to come.
    First {
        bytes: Vec<u8>,
    },
    V1 {
        reader: Box<RequestReader>,
        came: u64,
        answering: bool,
    },
    V2 {
        channel: Box<Channel>,
        frames: FrameReader,
        greeted: bool,
        observer: bool,
    },
}

/// A connection.
pub struct WorkerSession {
    welcome: Arc<Welcome>,
    state: State,
    outgoing: Vec<u8>,
}

impl WorkerSession {
    /// A connection that begins.
    pub fn new(welcome: Arc<Welcome>) -> WorkerSession {
        let bytes = Vec::with_capacity(VERSION_BYTES);
        WorkerSession { welcome, state: State::First { bytes }, outgoing: Vec::new() }
    }

    /// Bytes of the message that is coming, so far; 0 between messages.
    pub fn begun_bytes(&self) -> u64 {
        match &self.state {
            State::First { bytes } => bytes.len() as u64,
            State::V1 { came, .. } => *came,
            State::V2 { greeted: false, .. } => 1,
            State::V2 { channel, frames, .. } => {
                frames.begun_bytes() as u64 + u64::from(channel.is_begun())
            }
        }
    }

    /// Whether there is anything to send.
    pub fn has_outgoing(&self) -> bool {
        !self.outgoing.is_empty()
    }

    /// Bytes to send; also after an error, which they may explain to the peer.
    pub fn take_outgoing(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.outgoing)
    }

    /// Takes bytes of the peer; what it wants is appended to `wishes`.
    pub fn receive(&mut self, input: &[u8], wishes: &mut Vec<Wish>) -> Result<(), SessionError> {
        let taken = self.take(input, wishes);
        if let Err(error) = &taken {
            self.refuse(error);
        }
        if let State::V2 { channel, .. } = &mut self.state {
            self.outgoing.append(&mut channel.take_outgoing());
        }
        taken
    }

    /// Tells a peer of version 2 why the connection ends.
    fn refuse(&mut self, error: &SessionError) {
        if let State::V2 { channel, .. } = &mut self.state
            && channel.is_open()
            && !matches!(error, SessionError::Refused(_))
        {
            let mut frame = Vec::new();
            put_frame(&mut frame, Kind::Refuse, 0, error.to_string().as_bytes());
            // The connection ends in either case.
            let _ = channel.send(&frame);
        }
    }

    fn take(&mut self, mut input: &[u8], wishes: &mut Vec<Wish>) -> Result<(), SessionError> {
        let welcome = self.welcome.clone();
        while !input.is_empty() {
            match &mut self.state {
                State::First { bytes } => {
                    let (first, rest) =
                        input.split_at((VERSION_BYTES - bytes.len()).min(input.len()));
                    bytes.extend_from_slice(first);
                    input = rest;
                    let Some(first) = bytes.first_chunk::<VERSION_BYTES>() else { return Ok(()) };
                    let version = version_of(first)?;
                    let first = *first;
                    self.begin(version, &first)?;
                }
                State::V1 { reader, came, answering } => {
                    if *answering {
                        return Err(SessionError::Early);
                    }
                    let before = input.len();
                    let request = reader.take(&mut input)?;
                    *came += (before - input.len()) as u64;
                    if let Some(request) = request {
                        (*answering, *came) = (true, 0);
                        wishes.push(Wish::V1(request));
                    }
                }
                State::V2 { channel, frames, greeted, observer } => {
                    let mut plain = Vec::new();
                    channel.receive(input, &mut plain)?;
                    input = &[];
                    let mut plain = &plain[..];
                    while !plain.is_empty() {
                        let budgets = Budgets {
                            hello: if *greeted { 0 } else { FACTS_BYTES_MAX as u64 + 4 },
                            compute: match *greeted && !*observer {
                                true => welcome.compute_bytes(),
                                false => 0,
                            },
                            answer: 0,
                        };
                        let Some(frame) = frames.take(&mut plain, &budgets)? else { break };
                        if !*greeted {
                            let facts = greeted_by(&welcome, frame)?;
                            (*greeted, *observer) = (true, facts.observer);
                            let mut hello = Vec::with_capacity(FRAME_HEAD + welcome.greeting.len());
                            put_frame(&mut hello, Kind::Hello, 0, &welcome.greeting);
                            channel.send(&hello)?;
                            wishes.push(Wish::Greeted(Box::new(facts)));
                            continue;
                        }
                        wishes.push(wish_of(&welcome, &frame)?);
                    }
                }
            }
        }
        Ok(())
    }

    fn begin(&mut self, version: u32, first: &[u8]) -> Result<(), SessionError> {
        let welcome = &self.welcome;
        match version {
            v1::VERSION if welcome.policy.plain => {
                let mut reader = RequestReader::new(welcome.shape, welcome.request_bytes);
                reader.take(&mut &first[..])?;
                let (reader, came) = (Box::new(reader), first.len() as u64);
                self.state = State::V1 { reader, came, answering: false };
            }
            v1::VERSION => return Err(crate::wire::secure::ChannelError::PlainRefused.into()),
            V2 => {
                let mut channel = Box::new(Channel::worker(welcome.policy.clone()));
                channel.receive(first, &mut Vec::new())?;
                let frames = FrameReader::default();
                self.state = State::V2 { channel, frames, greeted: false, observer: false };
            }
            found => return Err(WireError::Version { found, wanted: V2 }.into()),
        }
        Ok(())
    }

    /// The bytes of the reply to the last request of version 1.
    pub fn reply_v1(&mut self, reply: &[u8]) {
        if let State::V1 { answering, .. } = &mut self.state {
            *answering = false;
            self.outgoing.extend_from_slice(reply);
        }
    }

    /// Answers a request of version 2.
    pub fn answer(&mut self, id: u64, answer: &Answer) -> Result<(), SessionError> {
        let mut frame = Vec::new();
        answer.put(&mut frame, id);
        self.send(&frame)
    }

    /// Answers a ping.
    pub fn pong(&mut self, id: u64, load: &Load) -> Result<(), SessionError> {
        let mut frame = Vec::new();
        put_frame(&mut frame, Kind::Pong, id, &load.body());
        self.send(&frame)
    }

    /// Says that no further requests are taken. Nothing in version 1 says so.
    pub fn drain(&mut self) -> Result<(), SessionError> {
        let State::V2 { greeted: true, .. } = &self.state else { return Ok(()) };
        let mut frame = Vec::new();
        put_frame(&mut frame, Kind::Drain, 0, &[]);
        self.send(&frame)
    }

    fn send(&mut self, frame: &[u8]) -> Result<(), SessionError> {
        if let State::V2 { channel, .. } = &mut self.state {
            channel.send(frame)?;
            self.outgoing.append(&mut channel.take_outgoing());
        }
        Ok(())
    }
}

/// Checks a peer's greeting.
fn greeted_by(welcome: &Welcome, frame: Frame) -> Result<Facts, SessionError> {
    match frame.kind {
        Kind::Hello => {
            let (facts, _) = facts_of(&frame.body)?;
            if !facts.observer {
                Facts::compare(&facts, &welcome.facts)?;
            }
            Ok(facts)
        }
        Kind::Refuse => Err(refusal(&frame.body)),
        kind => Err(out_of_order(kind)),
    }
}

/// What a frame of a peer that has greeted wants.
fn wish_of(welcome: &Welcome, frame: &Frame) -> Result<Wish, SessionError> {
    match frame.kind {
        Kind::Compute => {
            let request = Compute::parse(&frame.body, &welcome.shape, welcome.request_bytes)?;
            Ok(Wish::Compute { id: frame.id, request: Box::new(request) })
        }
        Kind::Cancel => Ok(Wish::Cancel(frame.id)),
        Kind::Ping => Ok(Wish::Ping(frame.id)),
        Kind::Refuse => Err(refusal(&frame.body)),
        kind @ (Kind::Hello | Kind::Answer | Kind::Pong | Kind::Drain) => Err(out_of_order(kind)),
    }
}
