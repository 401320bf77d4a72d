//! Version 1: request, reply, request, reply. Integers are u32 big-endian, rows little-endian f32.
//!
//! ```text
//! request: "COLIEX01" 1 layer hidden intermediate n, n × (expert rows inputs[rows][hidden])
//! reply:   "COLIEX01" 1 status n,                    n × (expert rows outputs[rows][hidden])
//! ```
//!
//! Outputs are unweighted, items in the order of the request. A status other than 0 means that the
//! request failed; ours then has no items, and the connection ends.

use super::incoming::{Floats, Part, put_floats};
use super::{MAGIC, Shape, WireError, within};

/// Version of these messages.
pub const VERSION: u32 = 1;
/// Most experts of a request.
pub const ITEMS_MAX: usize = 64;
/// Most rows of an expert.
pub const ROWS_MAX: u32 = 65_536;
/// Status of a request that was computed.
pub const OK: u32 = 0;
/// Status that this program gives to a request that was not.
pub const FAILED: u32 = 1;

/// Bytes of the head of a request, of a reply, and of an item.
const REQUEST_HEAD: usize = 28;
const REPLY_HEAD: usize = 20;
const ITEM_HEAD: usize = 8;

/// An expert and the rows that it gets or gives, `[rows, hidden]`.
#[derive(Clone, PartialEq, Debug)]
pub struct Item {
    /// The expert.
    pub expert: u32,
    /// The rows.
    pub rows: Vec<f32>,
}

/// A request.
#[derive(Clone, PartialEq, Debug)]
pub struct Request {
    /// The layer.
    pub layer: u32,
    /// Experts and their inputs, in no particular order.
    pub items: Vec<Item>,
}

/// A reply.
#[derive(Clone, PartialEq, Debug)]
pub struct Reply {
    /// [`OK`], or why not.
    pub status: u32,
    /// Experts and their outputs, in the order of the request.
    pub items: Vec<Item>,
}

fn put(out: &mut Vec<u8>, number: u32) {
    out.extend_from_slice(&number.to_be_bytes());
}

fn number_at(bytes: &[u8], at: usize) -> u32 {
    bytes[at..].first_chunk().map_or(0, |four| u32::from_be_bytes(*four))
}

/// Appends the head of a request for `items` experts, at most [`ITEMS_MAX`].
pub fn put_request(out: &mut Vec<u8>, shape: &Shape, layer: u32, items: usize) {
    debug_assert!((1..=ITEMS_MAX).contains(&items));
    out.extend_from_slice(&MAGIC);
    for number in [VERSION, layer, shape.hidden, shape.intermediate, items as u32] {
        put(out, number);
    }
}

/// Appends the head of a reply with `items` experts.
pub fn put_reply(out: &mut Vec<u8>, status: u32, items: usize) {
    out.extend_from_slice(&MAGIC);
    for number in [VERSION, status, items as u32] {
        put(out, number);
    }
}

/// Appends an item of a request or reply: an expert and its rows, one after another.
pub fn put_item<'a>(
    out: &mut Vec<u8>,
    expert: u32,
    rows: impl ExactSizeIterator<Item = &'a [f32]>,
) {
    put_item_head(out, expert, rows.len() as u32);
    rows.for_each(|row| put_floats(out, row));
}

/// Appends the head of an item, whose rows are to follow.
pub fn put_item_head(out: &mut Vec<u8>, expert: u32, rows: u32) {
    put(out, expert);
    put(out, rows);
}

fn check_head(head: &[u8]) -> Result<(), WireError> {
    let magic = head.first_chunk().copied().unwrap_or_default();
    if magic != MAGIC {
        return Err(WireError::Magic { found: magic });
    }
    match number_at(head, 8) {
        VERSION => Ok(()),
        found => Err(WireError::Version { found, wanted: VERSION }),
    }
}

/// Items that come: their number, and what has come of them.
#[derive(Clone, Debug, Default)]
struct Items {
    wanted: usize,
    have: Vec<Item>,
    head: Part<ITEM_HEAD>,
    /// The expert whose rows are coming.
    coming: Option<u32>,
    rows: Floats,
}

impl Items {
    fn begin(&mut self, wanted: usize) {
        *self = Items { wanted, ..Items::default() };
    }

    /// Takes items from the front of `input`; `check` is asked about each before its rows come, by
    /// its place, expert and number of rows. Returns all once the last has come.
    fn take(
        &mut self,
        input: &mut &[u8],
        hidden: u32,
        mut check: impl FnMut(usize, u32, u32) -> Result<(), WireError>,
    ) -> Result<Option<Vec<Item>>, WireError> {
        while self.have.len() < self.wanted {
            let expert = match self.coming {
                Some(expert) => expert,
                None => {
                    let Some(head) = self.head.take(input) else { return Ok(None) };
                    let (expert, rows) = (number_at(&head, 0), number_at(&head, 4));
                    check(self.have.len(), expert, rows)?;
                    self.rows.begin(rows as usize * hidden as usize);
                    self.coming = Some(expert);
                    expert
                }
            };
            let Some(rows) = self.rows.take(input) else { return Ok(None) };
            self.coming = None;
            self.have.push(Item { expert, rows });
        }
        self.wanted = 0;
        Ok(Some(std::mem::take(&mut self.have)))
    }
}

/// Reads requests from bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct RequestReader {
    shape: Shape,
    budget_bytes: u64,
    head: Part<REQUEST_HEAD>,
    layer: Option<u32>,
    items: Items,
    /// Bytes of rows that the items so far announced.
    announced_bytes: u64,
}

impl RequestReader {
    /// A reader of requests for a model of this shape, each with at most so many bytes of rows.
    pub fn new(shape: Shape, budget_bytes: u64) -> RequestReader {
        RequestReader {
            shape,
            budget_bytes,
            head: Part::default(),
            layer: None,
            items: Items::default(),
            announced_bytes: 0,
        }
    }

    /// Whether a request has begun and is not complete.
    pub fn is_begun(&self) -> bool {
        self.layer.is_some() || self.head.is_begun()
    }

    /// Takes bytes from the front of `input`, at most to the end of a request, which is then
    /// returned.
    pub fn take(&mut self, input: &mut &[u8]) -> Result<Option<Request>, WireError> {
        let layer = match self.layer {
            Some(layer) => layer,
            None => {
                let Some(head) = self.head.take(input) else { return Ok(None) };
                let (layer, items) = self.check(&head)?;
                self.items.begin(items as usize);
                self.announced_bytes = 0;
                self.layer = Some(layer);
                layer
            }
        };
        let (hidden, experts, budget_bytes) =
            (self.shape.hidden, self.shape.experts, self.budget_bytes);
        let announced_bytes = &mut self.announced_bytes;
        let check = |_, expert, rows: u32| {
            within("the expert", expert, 0, experts.saturating_sub(1))?;
            within("the number of rows", rows, 1, ROWS_MAX)?;
            *announced_bytes += u64::from(rows) * u64::from(hidden) * size_of::<f32>() as u64;
            if *announced_bytes > budget_bytes {
                return Err(WireError::Budget { budget_bytes });
            }
            Ok(())
        };
        let items = self.items.take(input, hidden, check)?;
        Ok(items.map(|items| {
            self.layer = None;
            Request { layer, items }
        }))
    }

    /// Layer and number of items of a head.
    fn check(&self, head: &[u8; REQUEST_HEAD]) -> Result<(u32, u32), WireError> {
        check_head(head)?;
        let [layer, hidden, intermediate, items] = [12, 16, 20, 24].map(|at| number_at(head, at));
        for (field, found, wanted) in [
            ("hidden size", hidden, self.shape.hidden),
            ("expert width", intermediate, self.shape.intermediate),
        ] {
            if found != wanted {
                return Err(WireError::Shape { field, found, wanted });
            }
        }
        within("the layer", layer, 0, self.shape.layers.saturating_sub(1))?;
        within("the number of experts", items, 1, ITEMS_MAX as u32)?;
        Ok((layer, items))
    }
}

/// Reads the reply to one request from bytes that come in pieces.
#[derive(Clone, Debug)]
pub struct ReplyReader {
    hidden: u32,
    /// Experts and numbers of rows that were asked for, in order.
    asked: Vec<(u32, u32)>,
    head: Part<REPLY_HEAD>,
    status: Option<u32>,
    items: Items,
}

impl ReplyReader {
    /// A reader of the reply to a request for these experts and numbers of rows.
    pub fn new(hidden: u32, asked: Vec<(u32, u32)>) -> ReplyReader {
        ReplyReader { hidden, asked, head: Part::default(), status: None, items: Items::default() }
    }

    /// Takes bytes from the front of `input`, at most to the end of the reply, which is then
    /// returned; what follows is read as another one. A reply with a status other than [`OK`] has
    /// no items.
    pub fn take(&mut self, input: &mut &[u8]) -> Result<Option<Reply>, WireError> {
        let status = match self.status {
            Some(status) => status,
            None => {
                let Some(head) = self.head.take(input) else { return Ok(None) };
                check_head(&head)?;
                let (status, items) = (number_at(&head, 12), number_at(&head, 16));
                // What a failed request's reply goes on with is not worth reading.
                if status != OK {
                    return Ok(Some(Reply { status, items: Vec::new() }));
                }
                let asked = self.asked.len() as u32;
                within("the number of experts answered for", items, asked, asked)?;
                self.items.begin(items as usize);
                self.status = Some(status);
                status
            }
        };
        let asked = &self.asked;
        let check = |item: usize, expert, rows| {
            let (wanted_expert, wanted_rows) = asked[item];
            for (field, found, wanted) in
                [("expert", expert, wanted_expert), ("a number of rows of", rows, wanted_rows)]
            {
                if found != wanted {
                    return Err(WireError::Answer { item, field, found, wanted });
                }
            }
            Ok(())
        };
        let items = self.items.take(input, self.hidden, check)?;
        Ok(items.map(|items| {
            self.status = None;
            Reply { status, items }
        }))
    }
}
