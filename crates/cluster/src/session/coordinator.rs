//! The coordinator's side of a connection, of either version.

use std::collections::{HashMap, VecDeque};
use std::sync::Arc;

use experts::ExpertRows;

use super::{SessionError, out_of_order, refusal};
use crate::identity::{Facts, Holdings, facts_of, greeting, holdings_of};
use crate::wire::Shape;
use crate::wire::secure::{Channel, Key};
use crate::wire::v1::{self, ReplyReader};
use crate::wire::v2::{
    Answer, Asked, Budgets, Compute, Frame, FrameReader, HELLO_BYTES, Kind, Load, Outputs, Status,
    put_frame,
};

/// Protocol versions that a coordinator speaks.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// Of other programs, and of earlier ones.
    One,
    /// Of this program.
    Two,
}

/// What a coordinator tells every worker.
#[derive(Clone, Debug)]
pub struct Hello {
    /// What it is.
    pub facts: Facts,
    /// Experts it knows.
    pub holdings: Arc<Holdings>,
    /// Shape of the model.
    pub shape: Shape,
    /// The key; with one only encrypted connections are made.
    pub key: Option<Key>,
}

/// A request as bytes, and what it asks for.
#[derive(Clone, Debug)]
pub struct Request {
    /// Its id, unlike that of any other on the connection.
    pub id: u64,
    version: Version,
    bytes: Vec<u8>,
    experts: Vec<u32>,
    asked: Asked,
    /// Distinct rows of the batch, ascending; empty in version 1.
    pub rows: Vec<u32>,
}

impl Request {
    /// A request for some experts of a layer with these input rows, `[rows, hidden]`. Sums are
    /// asked for in version 2 only.
    pub fn new<'a>(
        version: Version,
        shape: &Shape,
        id: u64,
        (layer, deadline_ms, sums): (u32, u32, bool),
        items: impl ExactSizeIterator<Item = ExpertRows<'a>> + Clone,
        values: &[f32],
    ) -> Request {
        let hidden = shape.hidden as usize;
        let counts: Vec<u32> = items.clone().map(|item| item.rows.len() as u32).collect();
        let experts = items.clone().map(|item| item.expert).collect();
        let mut bytes = Vec::new();
        let (rows, sums) = match version {
            Version::One => {
                v1::put_request(&mut bytes, shape, layer, items.len());
                for item in items {
                    let row = |row: &u32| &values[*row as usize * hidden..][..hidden];
                    v1::put_item(&mut bytes, item.expert, item.rows.iter().map(row));
                }
                (Vec::new(), false)
            }
            Version::Two => {
                let head = (layer, deadline_ms, sums);
                (Compute::put(&mut bytes, id, head, items, values, hidden), sums)
            }
        };
        let asked = Asked { counts, rows: rows.len() as u32, sums };
        Request { id, version, bytes, experts, asked, rows }
    }

    /// Bytes of the message.
    pub fn bytes(&self) -> u64 {
        self.bytes.len() as u64
    }

    /// Bytes of the whole answer, at most.
    pub fn answer_bytes(&self, hidden: u32) -> u64 {
        self.asked.answer_bytes(hidden)
    }
}

/// What a worker says.
#[derive(Debug, PartialEq)]
pub enum Event {
    /// It is what it must be.
    Joined {
        /// What it is; nothing is known of a peer of version 1.
        facts: Option<Box<Facts>>,
        /// What it holds.
        holdings: Holdings,
        /// Experts whose weights were compared by their hashes.
        compared: usize,
    },
    /// An answer.
    Answer {
        /// The request.
        id: u64,
        /// What came of it.
        answer: Box<Answer>,
    },
    /// It takes no further requests.
    Draining,
    /// It is there.
    Pong {
        /// The ping.
        id: u64,
        /// What it is doing.
        load: Load,
    },
}

enum State {
    V1 {
        /// Requests that have been sent or wait for those before them; the first is on its way.
        queue: VecDeque<Request>,
        reader: Option<Box<ReplyReader>>,
    },
    V2 {
        channel: Box<Channel>,
        frames: FrameReader,
        greeting: Option<Vec<u8>>,
        joined: bool,
    },
}

/// A connection.
pub struct CoordinatorSession {
    hello: Arc<Hello>,
    state: State,
    /// Requests of version 2 that are not answered; those that were cancelled without wanting to
    /// know.
    asked: HashMap<u64, Asked>,
    outgoing: Vec<u8>,
}

impl CoordinatorSession {
    /// A connection that begins.
    pub fn new(version: Version, hello: Arc<Hello>) -> CoordinatorSession {
        let mut outgoing = Vec::new();
        let state = match version {
            Version::One => State::V1 { queue: VecDeque::new(), reader: None },
            Version::Two => {
                let mut channel = Box::new(Channel::coordinator(hello.key.clone()));
                outgoing = channel.take_outgoing();
                let greeting = Some(greeting(&hello.facts, &Holdings::default()));
                State::V2 { channel, frames: FrameReader::default(), greeting, joined: false }
            }
        };
        CoordinatorSession { hello, state, asked: HashMap::new(), outgoing }
    }

    /// The version that is spoken.
    pub fn version(&self) -> Version {
        match self.state {
            State::V1 { .. } => Version::One,
            State::V2 { .. } => Version::Two,
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

    /// Takes bytes of the worker; what it says is appended to `events`.
    pub fn receive(&mut self, input: &[u8], events: &mut Vec<Event>) -> Result<(), SessionError> {
        let taken = self.take(input, events);
        if let State::V2 { channel, .. } = &mut self.state {
            if let Err(error @ (SessionError::Mismatch(_) | SessionError::Weights { .. })) = &taken
                && channel.is_open()
            {
                let mut frame = Vec::new();
                put_frame(&mut frame, Kind::Refuse, 0, error.to_string().as_bytes());
                // The connection ends in either case.
                let _ = channel.send(&frame);
            }
            self.outgoing.append(&mut channel.take_outgoing());
        }
        taken
    }

    fn take(&mut self, mut input: &[u8], events: &mut Vec<Event>) -> Result<(), SessionError> {
        let hidden = self.hello.shape.hidden;
        match &mut self.state {
            State::V1 { queue, reader } => {
                while !input.is_empty() {
                    let Some(coming) = reader else { return Err(SessionError::Unasked) };
                    let Some(reply) = coming.take(&mut input)? else { return Ok(()) };
                    if reply.status != v1::OK {
                        return Err(SessionError::Status(reply.status));
                    }
                    let Some(request) = queue.pop_front() else {
                        return Err(SessionError::Unasked);
                    };
                    let rows = reply.items.into_iter().flat_map(|item| item.rows).collect();
                    let answer = Box::new(Answer {
                        waited_us: 0,
                        computed_us: 0,
                        statuses: vec![Status::Computed; request.experts.len()],
                        outputs: Outputs::Rows(rows),
                    });
                    events.push(Event::Answer { id: request.id, answer });
                    *reader = queue.front_mut().map(|next| {
                        self.outgoing.append(&mut next.bytes);
                        Box::new(reply_reader(hidden, next))
                    });
                }
            }
            State::V2 { channel, frames, greeting, joined } => {
                let mut plain = Vec::new();
                channel.receive(input, &mut plain)?;
                if channel.is_open()
                    && let Some(body) = greeting.take()
                {
                    let mut frame = Vec::new();
                    put_frame(&mut frame, Kind::Hello, 0, &body);
                    channel.send(&frame)?;
                }
                let mut plain = &plain[..];
                while !plain.is_empty() {
                    let open = self.asked.values().map(|asked| asked.answer_bytes(hidden));
                    let budgets = Budgets {
                        hello: if *joined { 0 } else { HELLO_BYTES },
                        compute: 0,
                        answer: open.max().unwrap_or(0),
                    };
                    let Some(frame) = frames.take(&mut plain, &budgets)? else { break };
                    if !*joined {
                        events.push(joined_by(&self.hello, &frame)?);
                        *joined = true;
                        continue;
                    }
                    events.push(event_of(&mut self.asked, &frame, hidden)?);
                }
            }
        }
        Ok(())
    }

    /// Sends a request; in version 1 once those before it are answered. False when it was made for
    /// another version.
    pub fn ask(&mut self, mut request: Request) -> Result<bool, SessionError> {
        if request.version != self.version() {
            return Ok(false);
        }
        let hidden = self.hello.shape.hidden;
        match &mut self.state {
            State::V1 { queue, reader } => {
                if reader.is_none() {
                    self.outgoing.append(&mut request.bytes);
                    *reader = Some(Box::new(reply_reader(hidden, &request)));
                }
                queue.push_back(request);
            }
            State::V2 { channel, .. } => {
                channel.send(&request.bytes)?;
                self.outgoing.append(&mut channel.take_outgoing());
                self.asked.insert(request.id, request.asked);
            }
        }
        Ok(true)
    }

    /// Says that an answer is not wanted any more; it may come all the same. Nothing in version 1
    /// says so.
    pub fn cancel(&mut self, id: u64) -> Result<(), SessionError> {
        if self.asked.contains_key(&id) {
            return self.send(Kind::Cancel, id);
        }
        Ok(())
    }

    /// Asks whether the worker is there. Nothing in version 1 does.
    pub fn ping(&mut self, id: u64) -> Result<(), SessionError> {
        self.send(Kind::Ping, id)
    }

    fn send(&mut self, kind: Kind, id: u64) -> Result<(), SessionError> {
        if let State::V2 { channel, joined: true, .. } = &mut self.state {
            let mut frame = Vec::new();
            put_frame(&mut frame, kind, id, &[]);
            channel.send(&frame)?;
            self.outgoing.append(&mut channel.take_outgoing());
        }
        Ok(())
    }
}

fn reply_reader(hidden: u32, request: &Request) -> ReplyReader {
    let asked = request.experts.iter().copied().zip(request.asked.counts.iter().copied());
    ReplyReader::new(hidden, asked.collect())
}

/// Checks a worker's greeting.
fn joined_by(hello: &Hello, frame: &Frame) -> Result<Event, SessionError> {
    match frame.kind {
        Kind::Hello => {
            let (facts, rest) = facts_of(&frame.body)?;
            if hello.facts.observer {
                let holdings = holdings_of(rest, &facts.shape())?;
                let facts = Some(Box::new(facts));
                return Ok(Event::Joined { facts, holdings, compared: 0 });
            }
            Facts::compare(&hello.facts, &facts)?;
            let holdings = holdings_of(rest, &hello.shape)?;
            let compared = hello.holdings.compare(&holdings);
            let compared =
                compared.map_err(|(layer, expert)| SessionError::Weights { layer, expert })?;
            Ok(Event::Joined { facts: Some(Box::new(facts)), holdings, compared })
        }
        Kind::Refuse => Err(refusal(&frame.body)),
        kind => Err(out_of_order(kind)),
    }
}

/// What a frame of a worker that has joined says.
fn event_of(
    asked: &mut HashMap<u64, Asked>,
    frame: &Frame,
    hidden: u32,
) -> Result<Event, SessionError> {
    match frame.kind {
        Kind::Answer => {
            let asked = asked.remove(&frame.id).ok_or(SessionError::Unasked)?;
            let answer = Box::new(Answer::parse(&frame.body, &asked, hidden)?);
            Ok(Event::Answer { id: frame.id, answer })
        }
        Kind::Drain => Ok(Event::Draining),
        Kind::Pong => Ok(Event::Pong { id: frame.id, load: Load::parse(&frame.body)? }),
        Kind::Refuse => Err(refusal(&frame.body)),
        kind @ (Kind::Hello | Kind::Compute | Kind::Cancel | Kind::Ping) => Err(out_of_order(kind)),
    }
}
