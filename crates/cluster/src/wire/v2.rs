//! Version 2: frames in both directions, inside the channel of [`super::secure`]. Integers are
//! little-endian.
//!
//! ```text
//! frame:   u32 length of the body, u8 kind, u8 0, u16 0, u64 id, body
//! HELLO:   u32 length, facts as JSON, holdings
//! COMPUTE: u32 layer, deadline in ms, flags, rows R, items n; n × (u32 expert, rows r);
//!          per item r × u16 row of R; 0 or 2 bytes of 0; with flag 1 per item r × f32 weight;
//!          R × D f32
//! ANSWER:  u32 flags, µs waited, µs computed, items n; n × u8 status; 0 to 4 bytes;
//!          per computed item r × D f32, or with flag 1 R × D i64
//! PONG:    u32 requests waiting, u32 0, u64 rows computed, u64 bytes of experts in memory
//! REFUSE:  why, UTF-8
//! CANCEL, PING, DRAIN: nothing
//! ```

use experts::ExpertRows;

use super::incoming::{Part, put_floats};
use super::{Shape, WireError, within};

/// Bytes of a frame before its body.
pub const FRAME_HEAD: usize = 16;
/// Most bytes of a body that is neither greeting, request nor answer.
pub const SMALL_BYTES: u64 = 4 << 10;
/// Most bytes of a greeting: 16 for each expert of the largest model, and some text.
pub const HELLO_BYTES: u64 = (container::config::MAX_ROUTED_EXPERTS as u64) * 16 + (1 << 20);
/// Most experts of a request.
pub const ITEMS_MAX: usize = 1 << 16;
/// Most distinct rows of a request.
pub const ROWS_MAX: usize = 1 << 16;
/// Flag of a request, and of its answer, for weighted sums in place of outputs.
pub const SUMS: u32 = 1;

/// Bytes of the fixed parts.
const COMPUTE_HEAD: usize = 20;
const ANSWER_HEAD: usize = 16;

/// Kinds of frames.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Kind {
    /// What a side is; the first frame of each.
    Hello,
    /// A request.
    Compute,
    /// Its answer, with the same id.
    Answer,
    /// A request's answer is not wanted any more.
    Cancel,
    /// Is anybody there?
    Ping,
    /// Yes, and what it is doing; with the id of the question.
    Pong,
    /// The worker takes no further requests.
    Drain,
    /// Why the connection ends.
    Refuse,
}

impl Kind {
    const ALL: [Kind; 8] = [
        Kind::Hello,
        Kind::Compute,
        Kind::Answer,
        Kind::Cancel,
        Kind::Ping,
        Kind::Pong,
        Kind::Drain,
        Kind::Refuse,
    ];

    /// The byte in the frame.
    pub const fn code(self) -> u8 {
        self as u8 + 1
    }

    fn of(code: u8) -> Result<Kind, WireError> {
        let found = u32::from(code);
        within("the kind of the frame", found, 1, Kind::ALL.len() as u32)?;
        Ok(Kind::ALL[found as usize - 1])
    }
}

/// Appends the head of a frame whose body is to follow.
pub fn put_head(out: &mut Vec<u8>, kind: Kind, id: u64, body_bytes: usize) {
    out.extend_from_slice(&(body_bytes as u32).to_le_bytes());
    out.extend_from_slice(&[kind.code(), 0, 0, 0]);
    out.extend_from_slice(&id.to_le_bytes());
}

/// Appends a frame.
pub fn put_frame(out: &mut Vec<u8>, kind: Kind, id: u64, body: &[u8]) {
    put_head(out, kind, id, body.len());
    out.extend_from_slice(body);
}

/// A frame that has come.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Frame {
    /// Its kind.
    pub kind: Kind,
    /// Its id.
    pub id: u64,
    /// Its body.
    pub body: Vec<u8>,
}

/// Most bytes of a body, by kind.
#[derive(Clone, Copy, Debug)]
pub struct Budgets {
    /// Of a greeting; 0 once it has come.
    pub hello: u64,
    /// Of a request; 0 on the side that makes them.
    pub compute: u64,
    /// Of an answer; 0 on the side that makes them.
    pub answer: u64,
}

impl Budgets {
    fn of(&self, kind: Kind) -> u64 {
        match kind {
            Kind::Hello => self.hello,
            Kind::Compute => self.compute,
            Kind::Answer => self.answer,
            Kind::Cancel | Kind::Ping | Kind::Pong | Kind::Drain | Kind::Refuse => SMALL_BYTES,
        }
    }
}

/// Reads frames from bytes that come in pieces.
#[derive(Clone, Debug, Default)]
pub struct FrameReader {
    head: Part<FRAME_HEAD>,
    coming: Option<(Kind, u64, usize)>,
    body: Vec<u8>,
}

impl FrameReader {
    /// Bytes of the frame that is coming, so far.
    pub fn begun_bytes(&self) -> usize {
        let head = if self.coming.is_some() || self.head.is_begun() { FRAME_HEAD } else { 0 };
        head + self.body.len()
    }

    /// Takes bytes from the front of `input`, at most to the end of a frame, which is then
    /// returned.
    pub fn take(
        &mut self,
        input: &mut &[u8],
        budgets: &Budgets,
    ) -> Result<Option<Frame>, WireError> {
        let (kind, id, bytes) = match self.coming {
            Some(coming) => coming,
            None => {
                let Some(head) = self.head.take(input) else { return Ok(None) };
                let kind = Kind::of(head[4])?;
                if head[5..8] != [0; 3] {
                    return Err(WireError::Malformed {
                        what: "a frame's reserved bytes are not 0",
                    });
                }
                let bytes = number_at(&head, 0);
                if u64::from(bytes) > budgets.of(kind) {
                    return Err(WireError::Frame { kind, bytes, most: budgets.of(kind) });
                }
                let id = head[8..].first_chunk().map_or(0, |id| u64::from_le_bytes(*id));
                *self.coming.insert((kind, id, bytes as usize))
            }
        };
        let (taken, rest) = input.split_at((bytes - self.body.len()).min(input.len()));
        self.body.extend_from_slice(taken);
        *input = rest;
        if self.body.len() < bytes {
            return Ok(None);
        }
        self.coming = None;
        Ok(Some(Frame { kind, id, body: std::mem::take(&mut self.body) }))
    }
}

fn number_at(bytes: &[u8], at: usize) -> u32 {
    bytes.get(at..).and_then(|rest| rest.first_chunk()).map_or(0, |four| u32::from_le_bytes(*four))
}

fn put(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_le_bytes());
}

/// Pads a body that begins at `start` to a multiple of four bytes.
fn pad(out: &mut Vec<u8>, start: usize) {
    while !(out.len() - start).is_multiple_of(4) {
        out.push(0);
    }
}

/// The next `len` bytes of a body.
fn cut<'a>(rest: &mut &'a [u8], len: usize) -> Result<&'a [u8], WireError> {
    let cut = rest.split_at_checked(len);
    let (front, after) = cut.ok_or(WireError::Malformed { what: "a frame ends too early" })?;
    *rest = after;
    Ok(front)
}

/// Bytes to the next multiple of four.
fn cut_pad(rest: &mut &[u8], len: usize) -> Result<(), WireError> {
    let padding = cut(rest, len.next_multiple_of(4) - len)?;
    match padding.iter().all(|byte| *byte == 0) {
        true => Ok(()),
        false => Err(WireError::Malformed { what: "padding is not 0" }),
    }
}

/// A request: distinct rows once, and which of them each expert gets.
#[derive(Clone, PartialEq, Debug)]
pub struct Compute {
    /// The layer.
    pub layer: u32,
    /// Time within which the answer is wanted, from when the request has come.
    pub deadline_ms: u32,
    /// Whether weighted sums are asked for.
    pub sums: bool,
    /// Experts, ascending, and where their rows end.
    pub experts: Vec<(u32, u32)>,
    /// Rows of each expert, ascending.
    pub rows: Vec<u16>,
    /// Weights of each expert's outputs; empty unless sums are asked for.
    pub weights: Vec<f32>,
    /// Distinct rows, `[rows, hidden]`.
    pub values: Vec<f32>,
}

impl Compute {
    /// Rows of item `at`, and its weights if there are any.
    pub fn item(&self, at: usize) -> (u32, &[u16], &[f32]) {
        let start = if at == 0 { 0 } else { self.experts[at - 1].1 as usize };
        let (expert, end) = self.experts[at];
        let range = start..end as usize;
        (expert, &self.rows[range.clone()], self.weights.get(range).unwrap_or(&[]))
    }

    /// Appends a request for some experts of a batch with these input rows, `[rows, hidden]`.
    /// Returns the distinct rows, ascending.
    pub fn put<'a>(
        out: &mut Vec<u8>,
        id: u64,
        (layer, deadline_ms, sums): (u32, u32, bool),
        items: impl Iterator<Item = ExpertRows<'a>> + Clone,
        values: &[f32],
        hidden: usize,
    ) -> Vec<u32> {
        let mut distinct: Vec<u32> = items.clone().flat_map(|item| item.rows).copied().collect();
        distinct.sort_unstable();
        distinct.dedup();
        let head = out.len();
        put_head(out, Kind::Compute, id, 0);
        let body = out.len();
        let flags = if sums { SUMS } else { 0 };
        for number in
            [layer, deadline_ms, flags, distinct.len() as u32, items.clone().count() as u32]
        {
            put(out, number);
        }
        for item in items.clone() {
            put(out, item.expert);
            put(out, item.rows.len() as u32);
        }
        for row in items.clone().flat_map(|item| item.rows) {
            // Each is among them.
            let at = distinct.partition_point(|have| have < row);
            out.extend_from_slice(&(at as u16).to_le_bytes());
        }
        pad(out, body);
        if sums {
            items.for_each(|item| put_floats(out, item.weights));
        }
        for row in &distinct {
            put_floats(out, &values[*row as usize * hidden..][..hidden]);
        }
        let bytes = (out.len() - body) as u32;
        out[head..head + 4].copy_from_slice(&bytes.to_le_bytes());
        distinct
    }

    /// Reads a request's body; outputs must not take more than `budget_bytes`.
    pub fn parse(body: &[u8], shape: &Shape, budget_bytes: u64) -> Result<Compute, WireError> {
        let mut rest = body;
        let head = cut(&mut rest, COMPUTE_HEAD)?;
        let [layer, deadline_ms, flags, rows, items] =
            [0, 4, 8, 12, 16].map(|at| number_at(head, at));
        within("the layer", layer, 0, shape.layers.saturating_sub(1))?;
        within("the flags", flags, 0, SUMS)?;
        within("the number of rows", rows, 1, ROWS_MAX as u32)?;
        within("the number of experts", items, 1, ITEMS_MAX.min(shape.experts as usize) as u32)?;
        let sums = flags & SUMS != 0;
        let sum_bytes = u64::from(rows) * u64::from(shape.hidden) * 8;
        if sums && sum_bytes > budget_bytes {
            return Err(WireError::Budget { budget_bytes });
        }
        let heads = cut(&mut rest, items as usize * 8)?;
        let mut experts: Vec<(u32, u32)> = Vec::with_capacity(items as usize);
        let mut total = 0;
        for head in heads.chunks_exact(8) {
            let (expert, count) = (number_at(head, 0), number_at(head, 4));
            let least = experts.last().map_or(0, |(last, _)| last + 1);
            within("the expert", expert, least, shape.experts.saturating_sub(1))?;
            within("the number of rows", count, 1, rows)?;
            total += u64::from(count);
            let bytes = total * u64::from(shape.hidden) * 4;
            if bytes > budget_bytes {
                return Err(WireError::Budget { budget_bytes });
            }
            experts.push((expert, total as u32));
        }
        let total = total as usize;
        let numbers = cut(&mut rest, total * 2)?;
        cut_pad(&mut rest, total * 2)?;
        let number = |two: &[u8; 2]| u16::from_le_bytes(*two);
        let indices: Vec<u16> = numbers.as_chunks::<2>().0.iter().map(number).collect();
        let mut start = 0;
        let mut used = vec![false; rows as usize];
        for (_, end) in &experts {
            let mut least = 0;
            for row in &indices[start..*end as usize] {
                within("the row", u32::from(*row), least, rows - 1)?;
                least = u32::from(*row) + 1;
                used[usize::from(*row)] = true;
            }
            start = *end as usize;
        }
        if used.contains(&false) {
            return Err(WireError::Malformed { what: "a row is nobody's" });
        }
        let weights = if sums { floats(cut(&mut rest, total * 4)?) } else { Vec::new() };
        let values = cut(&mut rest, rows as usize * shape.hidden as usize * 4)?;
        if !rest.is_empty() {
            return Err(WireError::Malformed { what: "a request is longer than what it says" });
        }
        let (rows, values) = (indices, floats(values));
        Ok(Compute { layer, deadline_ms, sums, experts, rows, weights, values })
    }
}

fn floats(bytes: &[u8]) -> Vec<f32> {
    bytes.as_chunks::<4>().0.iter().map(|four| f32::from_le_bytes(*four)).collect()
}

/// What became of one expert of a request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Status {
    /// It was computed.
    Computed,
    /// The worker does not hold it.
    Missing,
    /// There is no memory for it.
    Memory,
    /// Too many requests are waiting.
    Busy,
    /// The time for it was over before it was begun.
    Deadline,
    /// An input or output is not finite, or a sum is out of its range.
    Numeric,
    /// Its bytes could not be read.
    Unreadable,
    /// The answer was not wanted any more.
    Cancelled,
    /// The worker is ending.
    Draining,
}

impl Status {
    const ALL: [Status; 9] = [
        Status::Computed,
        Status::Missing,
        Status::Memory,
        Status::Busy,
        Status::Deadline,
        Status::Numeric,
        Status::Unreadable,
        Status::Cancelled,
        Status::Draining,
    ];

    /// What it says to people.
    pub const fn text(self) -> &'static str {
        match self {
            Status::Computed => "computed",
            Status::Missing => "it does not hold the expert",
            Status::Memory => "it has no memory for the expert",
            Status::Busy => "it has too much to do",
            Status::Deadline => "it was not in time",
            Status::Numeric => "an input or output is not finite or out of range",
            Status::Unreadable => "it cannot read the expert",
            Status::Cancelled => "the request was cancelled",
            Status::Draining => "it is ending",
        }
    }
}

/// An answer.
#[derive(Clone, PartialEq, Debug)]
pub struct Answer {
    /// Microseconds that the request waited for others.
    pub waited_us: u32,
    /// Microseconds that it took then.
    pub computed_us: u32,
    /// What became of each expert, in the order of the request.
    pub statuses: Vec<Status>,
    /// What came out.
    pub outputs: Outputs,
}

/// Outputs of an answer.
#[derive(Clone, PartialEq, Debug)]
pub enum Outputs {
    /// Of each computed expert, in the order of the request, its rows, unweighted: `[rows,
    /// hidden]`.
    Rows(Vec<f32>),
    /// Of each distinct row the weighted outputs of all computed experts, added on the integer
    /// grid: `[rows, hidden]`.
    Sums(Vec<i64>),
}

/// What an answer answers.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Asked {
    /// Rows of each expert of the request.
    pub counts: Vec<u32>,
    /// Distinct rows.
    pub rows: u32,
    /// Whether sums were asked for.
    pub sums: bool,
}

impl Asked {
    /// Most bytes of an answer's body.
    pub fn answer_bytes(&self, hidden: u32) -> u64 {
        let statuses = self.counts.len().next_multiple_of(4) as u64;
        let rows = self.counts.iter().map(|count| u64::from(*count)).sum::<u64>();
        let numbers = if self.sums { u64::from(self.rows) * 8 } else { rows * 4 };
        ANSWER_HEAD as u64 + statuses + numbers * u64::from(hidden)
    }
}

impl Answer {
    /// Appends the frame of an answer.
    pub fn put(&self, out: &mut Vec<u8>, id: u64) {
        let bytes = self.bytes() as usize;
        out.reserve(bytes);
        put_head(out, Kind::Answer, id, bytes - FRAME_HEAD);
        let body = out.len();
        let flags = u32::from(matches!(self.outputs, Outputs::Sums(_)));
        for number in [flags, self.waited_us, self.computed_us, self.statuses.len() as u32] {
            put(out, number);
        }
        out.extend(self.statuses.iter().map(|status| *status as u8));
        pad(out, body);
        match &self.outputs {
            Outputs::Rows(rows) => put_floats(out, rows),
            Outputs::Sums(sums) => {
                sums.iter().for_each(|sum| out.extend_from_slice(&sum.to_le_bytes()));
            }
        }
    }

    /// Bytes of its frame.
    pub fn bytes(&self) -> u64 {
        let numbers = match &self.outputs {
            Outputs::Rows(rows) => size_of_val(&rows[..]),
            Outputs::Sums(sums) => size_of_val(&sums[..]),
        };
        (FRAME_HEAD + ANSWER_HEAD + self.statuses.len().next_multiple_of(4) + numbers) as u64
    }

    /// Reads an answer's body.
    pub fn parse(body: &[u8], asked: &Asked, hidden: u32) -> Result<Answer, WireError> {
        let mut rest = body;
        let head = cut(&mut rest, ANSWER_HEAD)?;
        let [flags, waited_us, computed_us, items] = [0, 4, 8, 12].map(|at| number_at(head, at));
        let flag = u32::from(asked.sums);
        within("the flags", flags, flag, flag)?;
        let count = asked.counts.len();
        within("the number of experts", items, count as u32, count as u32)?;
        let mut statuses = Vec::with_capacity(count);
        for code in cut(&mut rest, count)? {
            let most = Status::ALL.len() as u32 - 1;
            let code = within("the status", u32::from(*code), 0, most)?;
            statuses.push(Status::ALL[code as usize]);
        }
        cut_pad(&mut rest, ANSWER_HEAD + count)?;
        let computed = asked.counts.iter().zip(&statuses);
        let rows = computed.filter(|(_, status)| **status == Status::Computed);
        let rows: usize = rows.map(|(count, _)| *count as usize).sum();
        let (rows, size) = match (asked.sums, rows) {
            (false, rows) => (rows, 4),
            (true, 0) => (0, 8),
            (true, _) => (asked.rows as usize, 8),
        };
        let numbers = cut(&mut rest, rows * hidden as usize * size)?;
        if !rest.is_empty() {
            return Err(WireError::Malformed { what: "an answer is longer than what it says" });
        }
        let outputs = if asked.sums {
            let number = |eight: &[u8; 8]| i64::from_le_bytes(*eight);
            Outputs::Sums(numbers.as_chunks::<8>().0.iter().map(number).collect())
        } else {
            Outputs::Rows(floats(numbers))
        };
        Ok(Answer { waited_us, computed_us, statuses, outputs })
    }
}

/// What a worker is doing.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Load {
    /// Requests that wait or are computed.
    pub waiting: u32,
    /// Rows computed so far, per expert that served them.
    pub rows: u64,
    /// Bytes of experts in memory.
    pub cached_bytes: u64,
}

impl Load {
    /// The body of a pong.
    pub fn body(&self) -> Vec<u8> {
        let mut body = Vec::with_capacity(24);
        put(&mut body, self.waiting);
        put(&mut body, 0);
        body.extend_from_slice(&self.rows.to_le_bytes());
        body.extend_from_slice(&self.cached_bytes.to_le_bytes());
        body
    }

    /// Reads the body of a pong; what a later version adds is ignored.
    pub fn parse(body: &[u8]) -> Result<Load, WireError> {
        let mut rest = body;
        let waiting = number_at(cut(&mut rest, 8)?, 0);
        let mut long = || {
            let eight = cut(&mut rest, 8)?;
            Ok::<u64, WireError>(eight.first_chunk().map_or(0, |eight| u64::from_le_bytes(*eight)))
        };
        Ok(Load { waiting, rows: long()?, cached_bytes: long()? })
    }
}
