//! Route traces: which experts the router chose, for every row of every MoE call of a run.
//!
//! A trace is a measurement; nothing that is computed depends on one. `docs/sidecars.md` has the
//! format.

use std::io::{self, BufRead, Write};
use std::ops::Range;
use std::path::Path;

use container::config::{MAX_ROUTED_EXPERTS, MAX_TOP_K};

use crate::sidecar::{Line, Lines, RouteShape, SidecarError, open, whole};

/// Longest line read: three numbers and the most experts a token may have, each with the longest
/// gate that can be printed.
pub const TRACE_LINE_BYTES_MAX: usize = 64 + MAX_TOP_K * 64;
/// Most selections, and lines, of one trace: 10^5 tokens of 75 layers with 16 experts each. In
/// memory a selection takes eight bytes.
pub const TRACE_SELECTIONS_MAX: usize = 1 << 27;

/// The form of a line.
const FORM: &str = "<call> <row> <layer> <expert>:<gate> …";
/// What to do with a trace that has a wrong line.
const REMEDY: &str = "record the trace again";

/// Writes a trace, row by row.
///
/// Every row is one write; give a writer that collects them.
pub struct TraceWriter<W: Write + Send> {
    out: W,
    line: Vec<u8>,
}

impl<W: Write + Send> TraceWriter<W> {
    /// A trace that begins.
    pub fn new(out: W) -> TraceWriter<W> {
        TraceWriter { out, line: Vec::new() }
    }

    /// Writes the routes of a row: experts in the router's order, each with the gate applied to its
    /// output, which is finite. `call` grows with every MoE call of the run, `row` within a call.
    pub fn row(
        &mut self,
        call: u64,
        row: u32,
        layer: usize,
        routes: impl Iterator<Item = (u32, f32)>,
    ) -> io::Result<()> {
        self.line.clear();
        write!(self.line, "{call} {row} {layer}")?;
        for (expert, gate) in routes {
            write!(self.line, " {expert}:{gate:.4}")?;
        }
        self.line.push(b'\n');
        self.out.write_all(&self.line)
    }

    /// Hands everything written so far on.
    pub fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A trace in memory.
#[derive(Debug, Default)]
pub struct Trace {
    calls: Vec<Call>,
    rows: Vec<Row>,
    experts: Vec<u32>,
    gates: Vec<f32>,
    layer_count: usize,
    expert_count: usize,
    top_k: usize,
}

#[derive(Debug)]
struct Call {
    number: u64,
    layer: u32,
    /// Where its rows end.
    end: u32,
}

#[derive(Debug)]
struct Row {
    index: u32,
    /// Where its selections end.
    end: u32,
}

/// One MoE call of a trace.
#[derive(Clone, Copy)]
pub struct TraceCall<'a> {
    trace: &'a Trace,
    at: usize,
}

/// The routes of one row.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct TraceRow<'a> {
    /// Index of the row in its call.
    pub row: u32,
    /// Its experts, in the router's order.
    pub experts: &'a [u32],
    /// The gate of each.
    pub gates: &'a [f32],
}

impl Trace {
    /// Reads a trace line by line. `path` is for messages, `shape` bounds layers and experts.
    ///
    /// Blank lines are skipped. Any other line that is not of the format is an error: a number out
    /// of range, a call whose lines are not together, a call or row that does not grow, an expert
    /// twice in a row.
    pub fn parse(
        path: &Path,
        source: impl BufRead,
        shape: RouteShape,
    ) -> Result<Trace, SidecarError> {
        let mut lines = Lines::new(path, source, TRACE_LINE_BYTES_MAX, REMEDY);
        let mut trace = Trace::default();
        while let Some(line) = lines.next()? {
            if line.number > TRACE_SELECTIONS_MAX {
                return Err(line.too_many("lines", TRACE_SELECTIONS_MAX));
            }
            if !line.text.is_empty() {
                trace.add(&line, shape)?;
            }
        }
        Ok(trace)
    }

    /// Reads a trace from a file or pipe.
    pub fn load(path: &Path, shape: RouteShape) -> Result<Trace, SidecarError> {
        Trace::parse(path, open(path)?, shape)
    }

    /// Adds the row of a line.
    fn add(&mut self, line: &Line<'_>, shape: RouteShape) -> Result<(), SidecarError> {
        let mut fields = line.text.split_ascii_whitespace();
        let mut field = || fields.next().ok_or_else(|| line.wrong(FORM));
        let (call, row, layer) = (field()?, field()?, field()?);
        let (Some(call), Some(row)) = (whole::<u64>(call), whole::<u32>(row)) else {
            return Err(line.wrong(FORM));
        };
        let layer = line.index("a layer", layer, shape.layers)?;
        self.begin_row(line, call, row, layer)?;
        let start = self.experts.len();
        for route in fields {
            let Some((expert, gate)) = route.split_once(':') else {
                return Err(line.wrong(FORM));
            };
            let expert = line.index("an expert", expert, shape.experts)?;
            let gate = gate.parse::<f32>().ok().filter(|gate| gate.is_finite());
            let Some(gate) = gate else { return Err(line.wrong(FORM)) };
            if self.experts[start..].contains(&expert) {
                return Err(line.wrong_part("each expert once", format!("expert {expert} twice")));
            }
            self.experts.push(expert);
            self.gates.push(gate);
            self.expert_count = self.expert_count.max(expert as usize + 1);
        }
        let selected = self.experts.len() - start;
        if selected == 0 {
            return Err(line.wrong(FORM));
        }
        if selected > MAX_TOP_K {
            return Err(line.too_many("experts of a row", MAX_TOP_K));
        }
        if self.experts.len() > TRACE_SELECTIONS_MAX {
            return Err(line.too_many("selections", TRACE_SELECTIONS_MAX));
        }
        self.top_k = self.top_k.max(selected);
        self.layer_count = self.layer_count.max(layer as usize + 1);
        // Each is within its own bound; no model has both at once.
        if self.layer_count * self.expert_count > MAX_ROUTED_EXPERTS {
            return Err(line.too_many("routed experts", MAX_ROUTED_EXPERTS));
        }
        self.rows.push(Row { index: row, end: self.experts.len() as u32 });
        if let Some(last) = self.calls.last_mut() {
            last.end = self.rows.len() as u32;
        }
        Ok(())
    }

    /// Checks that a row may follow what was read, and begins its call if it is the first.
    fn begin_row(
        &mut self,
        line: &Line<'_>,
        call: u64,
        row: u32,
        layer: u32,
    ) -> Result<(), SidecarError> {
        if let Some(last) = self.calls.last() {
            if call < last.number {
                let expected = format!("call {} or a later one of the same run", last.number);
                return Err(line.wrong_part(expected, format!("call {call}")));
            }
            if call == last.number {
                let before = self.rows.last().map_or(0, |row| row.index);
                if layer != last.layer {
                    let expected = format!("layer {} as before in call {call}", last.layer);
                    return Err(line.wrong_part(expected, format!("layer {layer}")));
                }
                if row <= before {
                    let expected = format!("a row after {before} of call {call}");
                    return Err(line.wrong_part(expected, format!("row {row}")));
                }
                return Ok(());
            }
        }
        self.calls.push(Call { number: call, layer, end: self.rows.len() as u32 });
        Ok(())
    }

    /// Its calls, in order.
    pub fn calls(&self) -> impl ExactSizeIterator<Item = TraceCall<'_>> {
        (0..self.calls.len()).map(|at| TraceCall { trace: self, at })
    }

    /// Rows of all calls.
    pub fn rows(&self) -> usize {
        self.rows.len()
    }

    /// One more than the highest layer.
    pub fn layers(&self) -> usize {
        self.layer_count
    }

    /// One more than the highest expert.
    pub fn experts(&self) -> usize {
        self.expert_count
    }

    /// Most experts of a row.
    pub fn top_k(&self) -> usize {
        self.top_k
    }

    /// A row by its place among the rows of all calls.
    pub(crate) fn row(&self, at: usize) -> TraceRow<'_> {
        let start = if at == 0 { 0 } else { self.rows[at - 1].end as usize };
        let range = start..self.rows[at].end as usize;
        TraceRow {
            row: self.rows[at].index,
            experts: &self.experts[range.clone()],
            gates: &self.gates[range],
        }
    }
}

impl<'a> TraceCall<'a> {
    /// Its number in the run.
    pub fn number(&self) -> u64 {
        self.trace.calls[self.at].number
    }

    /// The layer that was computed.
    pub fn layer(&self) -> usize {
        self.trace.calls[self.at].layer as usize
    }

    /// Places of its rows among the rows of all calls.
    pub(crate) fn places(&self) -> Range<usize> {
        let start = if self.at == 0 { 0 } else { self.trace.calls[self.at - 1].end as usize };
        start..self.trace.calls[self.at].end as usize
    }

    /// Its rows, ascending.
    pub fn rows(&self) -> impl ExactSizeIterator<Item = TraceRow<'a>> + use<'a> {
        let trace = self.trace;
        self.places().map(move |at| trace.row(at))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Trace, SidecarError> {
        Trace::parse(Path::new("trace"), text.as_bytes(), RouteShape::ANY)
    }

    type Rows = Vec<(u64, usize, u32, Vec<u32>, Vec<f32>)>;

    fn rows(trace: &Trace) -> Rows {
        let call = |call: TraceCall<'_>| -> Rows {
            let row = |r: TraceRow<'_>| {
                (call.number(), call.layer(), r.row, r.experts.to_vec(), r.gates.to_vec())
            };
            call.rows().map(row).collect()
        };
        trace.calls().flat_map(call).collect()
    }

    #[test]
    fn a_trace_survives_its_text() {
        let gates = [0.12345, -0.0, 1.0, f32::MAX, f32::MIN, 1e-9, 2.5, 0.00005];
        let mut expected = Rows::new();
        let mut writer = TraceWriter::new(Vec::new());
        for call in 0..6u64 {
            let (number, layer) = (call * call, call as usize % 3 + 3);
            for row in 0..(call as u32 % 2 + 1) {
                let experts: Vec<u32> = (0..=row).map(|at| (at * 31 + call as u32) % 256).collect();
                let gate = |at: usize| gates[(at + call as usize) % gates.len()];
                let given: Vec<f32> = (0..experts.len()).map(gate).collect();
                let routes = experts.iter().copied().zip(given.iter().copied());
                writer.row(number, row, layer, routes).unwrap();
                let printed = given.iter().map(|gate| format!("{gate:.4}").parse().unwrap());
                expected.push((number, layer, row, experts, printed.collect()));
            }
        }
        writer.flush().unwrap();
        let text = String::from_utf8(writer.out).unwrap();
        assert!(text.starts_with("0 0 3 0:0.1235\n1 0 4 1:-0.0000\n1 1 4 "), "{text}");
        let trace = parse(&text).unwrap();
        assert_eq!(rows(&trace), expected);
        assert_eq!(trace.calls().len(), 6);
        assert_eq!((trace.rows(), trace.layers(), trace.top_k()), (9, 6, 2));
        let shape = RouteShape { layers: trace.layers(), experts: trace.experts() };
        Trace::parse(Path::new("trace"), text.as_bytes(), shape).unwrap();
        for less in [
            RouteShape { layers: shape.layers - 1, ..shape },
            RouteShape { experts: shape.experts - 1, ..shape },
        ] {
            Trace::parse(Path::new("trace"), text.as_bytes(), less).unwrap_err();
        }
    }

    #[test]
    fn the_longest_row_that_can_be_written_is_read() {
        let mut writer = TraceWriter::new(Vec::new());
        let experts = (0..MAX_TOP_K as u32).map(|at| (10_000 + at, f32::MIN));
        writer.row(u64::MAX, u32::MAX, 20, experts).unwrap();
        let text = String::from_utf8(writer.out).unwrap();
        assert_eq!(parse(&text).unwrap().top_k(), MAX_TOP_K);
    }

    #[test]
    fn blank_lines_and_other_line_ends_are_accepted() {
        let trace = parse("\n 0 0 1 5:1.0000\r\n\r\n  \n0 1 1 6:0.5 7:0.5").unwrap();
        assert_eq!(trace.rows(), 2);
        assert_eq!(parse("").unwrap().calls().len(), 0);
    }

    #[test]
    fn wrong_lines_are_refused_with_file_line_and_facts() {
        let cases = [
            ("x", "<call>"),
            ("0 0", "<call>"),
            ("0 0 1", "<call>"),
            ("-1 0 1 2:1", "<call>"),
            ("+1 0 1 2:1", "<call>"),
            ("0 0 1 2", "<call>"),
            ("0 0 1 2:", "<call>"),
            ("0 0 1 2:nan", "<call>"),
            ("0 0 1 2:inf", "<call>"),
            ("0 0 1 x:1", "an expert below 65536"),
            ("0 0 1 65536:1", "\"65536\""),
            ("0 0 1032 2:1", "a layer below 1032"),
            ("0 4294967296 1 2:1", "<call>"),
            ("99999999999999999999 0 1 2:1", "<call>"),
            ("0 0 1 2:1 2:1", "expert 2 twice"),
            ("0 0 9 65535:1", "routed experts"),
        ];
        for (text, needle) in cases {
            let error = parse(&format!("\n{text}\n")).unwrap_err().to_string();
            assert!(error.contains(needle), "{text}: {error}");
            assert!(error.starts_with("trace line 2: "), "{text}: {error}");
        }
        let cases = [
            ("5 0 1 2:1\n4 0 2 2:1", "call 5 or a later one"),
            ("5 0 1 2:1\n5 1 2 2:1", "layer 1 as before in call 5"),
            ("5 3 1 2:1\n5 3 1 2:1", "a row after 3 of call 5"),
        ];
        for (text, needle) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(needle) && error.contains("line 2"), "{text}: {error}");
        }
        let many: String = (0..=MAX_TOP_K).map(|expert| format!(" {expert}:0")).collect();
        let error = parse(&format!("0 0 1{many}\n")).unwrap_err().to_string();
        assert!(error.contains("64 experts of a row"), "{error}");
        let error = Trace::parse(Path::new("t"), &b"0 0 1 \xff:1\n"[..], RouteShape::ANY);
        assert!(error.unwrap_err().to_string().contains("UTF-8"));
    }

    #[test]
    fn an_endless_line_is_refused_without_being_held() {
        let endless = io::BufReader::new(io::repeat(b'1'));
        let error = Trace::parse(Path::new("trace"), endless, RouteShape::ANY).unwrap_err();
        assert!(error.to_string().contains("line 1: expected at most"), "{error}");
    }
}
