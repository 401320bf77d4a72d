//! `.coli_pairs`: which experts follow which, one and two layers on, and whom to expect next.
//!
//! The table is counted from a route trace. What is done with a prediction is not known here.
//! `docs/sidecars.md` has the format.

use std::collections::HashSet;
use std::fmt::Write;
use std::io::BufRead;
use std::path::Path;

use container::config::MAX_ROUTED_EXPERTS;

use crate::sidecar::{Line, Lines, RouteShape, SidecarError, open, whole};
use crate::trace::{Trace, TraceCall};

/// Name of a coupling table beside its model.
pub const PAIRS_FILE: &str = ".coli_pairs";
/// Version of the format.
pub const PAIRS_VERSION: u64 = 1;
/// Layers ahead that are counted.
pub const DISTANCE_MAX: usize = 2;
/// Followers kept of an expert at a distance: more cost memory and hardly ever win.
pub const FOLLOWERS_MAX: usize = 16;
/// Longest line read: three numbers and all followers, each with the largest count.
pub const PAIRS_LINE_BYTES_MAX: usize = 64 + FOLLOWERS_MAX * 32;
/// Most lines of a table: every routed expert a model may have, at every distance.
pub const PAIRS_LINES_MAX: usize = MAX_ROUTED_EXPERTS * DISTANCE_MAX;

/// First word of a table.
const MAGIC: &str = "COLIPAIRS";
/// The form of its first line.
const HEADER: &str = "COLIPAIRS 1 <lines that follow>";
/// The form of the others.
const FORM: &str = "<layer> <distance> <expert> <follower>:<count> …";
/// What to do with a table that has a wrong line.
const REMEDY: &str = "make the table again with `coli route pairs`";

/// An expert that was chosen for the same row some layers on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Follower {
    /// The expert, of the later layer.
    pub expert: u32,
    /// Rows for which it was, at least 1.
    pub count: u64,
}

/// The table.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Pairs {
    /// [`key`] of each line, ascending.
    keys: Vec<u64>,
    /// Where the followers of each line end.
    ends: Vec<u32>,
    followers: Vec<Follower>,
}

/// Working memory of [`Pairs::predict`]; it grows to the largest prediction and stays.
#[derive(Debug, Default)]
pub struct Workspace {
    candidates: Vec<Follower>,
}

/// How many of the experts that were chosen a table had named.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Recall {
    /// Chosen experts that were among the predicted ones.
    pub hits: u64,
    /// Chosen experts.
    pub selections: u64,
}

impl Recall {
    /// Hits per selection; `None` where nothing was predicted.
    pub fn share(self) -> Option<f64> {
        (self.selections > 0).then(|| self.hits as f64 / self.selections as f64)
    }
}

/// Order of the lines: by layer, distance, expert.
fn key(layer: usize, distance: usize, expert: u32) -> u64 {
    ((layer * DISTANCE_MAX + distance - 1) as u64) << 32 | u64::from(expert)
}

/// Layer, distance and expert of a [`key`].
fn parts(key: u64) -> (usize, usize, u32) {
    let place = (key >> 32) as usize;
    (place / DISTANCE_MAX, place % DISTANCE_MAX + 1, key as u32)
}

/// Most frequent first, ties to the lower id.
fn by_count(a: &Follower, b: &Follower) -> std::cmp::Ordering {
    b.count.cmp(&a.count).then(a.expert.cmp(&b.expert))
}

impl Pairs {
    /// Counts a trace: for every row, its experts of a layer with its experts one and two layers on
    /// in the same forward pass. A pass is a run of calls whose layers ascend; two of its calls are
    /// coupled only if they have as many rows.
    pub fn of(trace: &Trace) -> Pairs {
        let passes = Passes::of(trace);
        let mut counter = Counter::new(trace.experts());
        let mut pairs = Pairs::default();
        let mut rows = Vec::new();
        for layer in 0..trace.layers() {
            for distance in 1..=DISTANCE_MAX {
                passes.coupled(layer, distance, &mut rows);
                counter.sort(trace, &rows);
                for expert in 0..trace.experts() as u32 {
                    let followers = counter.followers(trace, &rows, expert);
                    if !followers.is_empty() {
                        pairs.push(key(layer, distance, expert), followers);
                    }
                }
            }
        }
        pairs
    }

    /// Adds a line.
    fn push(&mut self, key: u64, followers: &[Follower]) {
        self.keys.push(key);
        self.followers.extend_from_slice(followers);
        self.ends.push(self.followers.len() as u32);
    }

    /// Reads a table line by line. `path` is for messages, `shape` bounds layers and experts.
    ///
    /// Lines may come in any order. Anything else that is not of the format is an error: another
    /// version, another number of lines than announced, a number out of range, followers out of
    /// order or twice, a line twice.
    pub fn parse(
        path: &Path,
        source: impl BufRead,
        shape: RouteShape,
    ) -> Result<Pairs, SidecarError> {
        let mut lines = Lines::new(path, source, PAIRS_LINE_BYTES_MAX, REMEDY);
        let none = Line { path, number: 1, text: "", remedy: REMEDY };
        let announced = header(&lines.next()?.unwrap_or(none))?;
        let mut read = Pairs::default();
        let mut last = 1;
        while let Some(line) = lines.next()? {
            last = line.number;
            if read.lines() == announced {
                return Err(line.wrong(format_args!("the end, line 1 announces {announced} lines")));
            }
            read.add(&line, shape)?;
        }
        if read.lines() < announced {
            let end = Line { number: last + 1, ..none };
            let expected = format_args!("{announced} lines, as line 1 announces").to_string();
            return Err(end.wrong_part(expected, format!("the end after {}", read.lines())));
        }
        read.sorted(&none)
    }

    /// Reads a table from a file or pipe.
    pub fn load(path: &Path, shape: RouteShape) -> Result<Pairs, SidecarError> {
        Pairs::parse(path, open(path)?, shape)
    }

    /// Adds the line of a file.
    fn add(&mut self, line: &Line<'_>, shape: RouteShape) -> Result<(), SidecarError> {
        let mut fields = line.text.split_ascii_whitespace();
        let mut field = || fields.next().ok_or_else(|| line.wrong(FORM));
        let (layer, distance, expert) = (field()?, field()?, field()?);
        let layer = line.index("a layer", layer, shape.layers)? as usize;
        let distance = whole(distance).filter(|distance| (1..=DISTANCE_MAX).contains(distance));
        let Some(distance) = distance else {
            return Err(line.wrong(format_args!("{FORM} with a distance of 1 or {DISTANCE_MAX}")));
        };
        if layer + distance >= shape.layers {
            let found = format!("layer {layer} at distance {distance}");
            return Err(line.wrong_part(format!("followers below layer {}", shape.layers), found));
        }
        let expert = line.index("an expert", expert, shape.experts)?;
        let start = self.followers.len();
        for field in fields {
            let Some((follower, count)) = field.split_once(':') else {
                return Err(line.wrong(FORM));
            };
            let follower = line.index("a follower", follower, shape.experts)?;
            let Some(count) = whole(count).filter(|count| *count > 0) else {
                return Err(line.wrong_part("a 64-bit count of at least 1", field));
            };
            let follower = Follower { expert: follower, count };
            let before = &self.followers[start..];
            if before.last().is_some_and(|before| by_count(before, &follower).is_ge()) {
                let expected = "the most frequent follower first, ties to the lower id";
                return Err(line.wrong_part(expected, field));
            }
            if before.iter().any(|before| before.expert == follower.expert) {
                return Err(line.wrong_part("each follower once", field));
            }
            if before.len() == FOLLOWERS_MAX {
                return Err(line.too_many("followers", FOLLOWERS_MAX));
            }
            self.followers.push(follower);
        }
        if self.followers.len() == start {
            return Err(line.wrong(FORM));
        }
        self.keys.push(key(layer, distance, expert));
        self.ends.push(self.followers.len() as u32);
        Ok(())
    }

    /// The same lines in order of their keys, none of them twice. Line `i` was on line `i + 2` of
    /// the file of `none`.
    fn sorted(self, none: &Line<'_>) -> Result<Pairs, SidecarError> {
        let mut order: Vec<u32> = (0..self.lines() as u32).collect();
        order.sort_by_key(|at| self.keys[*at as usize]);
        let mut sorted = Pairs::default();
        for at in order {
            let key = self.keys[at as usize];
            if sorted.keys.last() == Some(&key) {
                let (layer, distance, expert) = parts(key);
                let found = format!("a second one of {layer} {distance} {expert}");
                let line = Line { number: at as usize + 2, ..*none };
                return Err(line.wrong_part("one line per layer, distance and expert", found));
            }
            sorted.push(key, self.line(at as usize));
        }
        Ok(sorted)
    }

    /// The text of the file.
    pub fn to_text(&self) -> String {
        let mut text = format!("{MAGIC} {PAIRS_VERSION} {}\n", self.lines());
        for (at, key) in self.keys.iter().enumerate() {
            let (layer, distance, expert) = parts(*key);
            // Writing to a string cannot fail.
            let _ = write!(text, "{layer} {distance} {expert}");
            for follower in self.line(at) {
                let _ = write!(text, " {}:{}", follower.expert, follower.count);
            }
            text.push('\n');
        }
        text
    }

    /// Lines of the table.
    pub fn lines(&self) -> usize {
        self.keys.len()
    }

    /// Experts that something is known to follow, each counted in its layer.
    pub fn experts(&self) -> usize {
        let leader = |key: &u64| {
            let (layer, _, expert) = parts(*key);
            (layer, expert)
        };
        self.keys.iter().map(leader).collect::<HashSet<_>>().len()
    }

    /// Followers of line `at`.
    fn line(&self, at: usize) -> &[Follower] {
        let start = if at == 0 { 0 } else { self.ends[at - 1] as usize };
        &self.followers[start..self.ends[at] as usize]
    }

    /// Who followed an expert of `layer` in layer `layer + distance`, most frequent first.
    pub fn followers(&self, layer: usize, distance: usize, expert: u32) -> &[Follower] {
        if !(1..=DISTANCE_MAX).contains(&distance) {
            return &[];
        }
        self.keys.binary_search(&key(layer, distance, expert)).map_or(&[], |at| self.line(at))
    }

    /// Puts the experts of layer `layer + distance` that are most likely after `routed` of `layer`
    /// into `out`, best first, at most `top_k`. The score of a candidate is the sum of its counts
    /// over the routed experts; ties go to the lower id. Experts that never followed are not named.
    pub fn predict(
        &self,
        layer: usize,
        distance: usize,
        routed: &[u32],
        top_k: usize,
        workspace: &mut Workspace,
        out: &mut Vec<u32>,
    ) {
        let candidates = &mut workspace.candidates;
        candidates.clear();
        for expert in routed {
            candidates.extend_from_slice(self.followers(layer, distance, *expert));
        }
        candidates.sort_unstable_by_key(|candidate| candidate.expert);
        candidates.dedup_by(|next, kept| {
            let same = next.expert == kept.expert;
            if same {
                kept.count = kept.count.saturating_add(next.count);
            }
            same
        });
        candidates.sort_unstable_by(by_count);
        out.clear();
        out.extend(candidates.iter().take(top_k).map(|candidate| candidate.expert));
    }

    /// How many of the experts that a trace's rows were routed to the table names when it predicts
    /// `top_k` from the same rows `distance` layers before.
    pub fn recall(&self, trace: &Trace, distance: usize, top_k: usize) -> Recall {
        let passes = Passes::of(trace);
        let (mut workspace, mut predicted) = (Workspace::default(), Vec::new());
        let mut recall = Recall::default();
        let mut rows = Vec::new();
        for layer in 0..trace.layers() {
            passes.coupled(layer, distance, &mut rows);
            for (row, later) in &rows {
                let routed = trace.row(*row as usize).experts;
                self.predict(layer, distance, routed, top_k, &mut workspace, &mut predicted);
                let chosen = trace.row(*later as usize).experts;
                let hit = chosen.iter().filter(|expert| predicted.contains(expert));
                recall.hits += hit.count() as u64;
                recall.selections += chosen.len() as u64;
            }
        }
        recall
    }
}

/// Number of lines that the first line announces.
fn header(line: &Line<'_>) -> Result<usize, SidecarError> {
    let mut fields = line.text.split_ascii_whitespace();
    if fields.next() != Some(MAGIC) {
        return Err(line.wrong(HEADER));
    }
    match fields.next().and_then(whole) {
        None => return Err(line.wrong(HEADER)),
        Some(PAIRS_VERSION) => {}
        Some(found) => {
            let path = line.path.to_owned();
            return Err(SidecarError::Version { path, found, version: PAIRS_VERSION });
        }
    }
    match (fields.next().and_then(whole), fields.next()) {
        (Some(lines), None) if lines <= PAIRS_LINES_MAX => Ok(lines),
        (Some(_), None) => Err(line.too_many("lines", PAIRS_LINES_MAX)),
        _ => Err(line.wrong(HEADER)),
    }
}

/// The forward passes of a trace.
struct Passes<'a> {
    /// For each layer its calls, each with the number of its pass, ascending.
    by_layer: Vec<Vec<(u32, TraceCall<'a>)>>,
}

impl<'a> Passes<'a> {
    fn of(trace: &'a Trace) -> Passes<'a> {
        let mut by_layer = vec![Vec::new(); trace.layers()];
        let (mut pass, mut before) = (0, None);
        for call in trace.calls() {
            if before.is_some_and(|before| call.layer() <= before) {
                pass += 1;
            }
            before = Some(call.layer());
            by_layer[call.layer()].push((pass, call));
        }
        Passes { by_layer }
    }

    /// Puts the places of the same row in calls of `layer` and of `layer + distance` of one pass
    /// into `rows`, for all passes that have both with as many rows.
    fn coupled(&self, layer: usize, distance: usize, rows: &mut Vec<(u32, u32)>) {
        rows.clear();
        let Some(later) = self.by_layer.get(layer + distance) else { return };
        let mut later = later.iter().peekable();
        for (pass, call) in &self.by_layer[layer] {
            while later.next_if(|(other, _)| other < pass).is_some() {}
            let Some((_, next)) = later.next_if(|(other, _)| other == pass) else { continue };
            let (here, there) = (call.places(), next.places());
            if here.len() != there.len() {
                continue;
            }
            let mut there = there.zip(next.rows()).peekable();
            for (place, row) in here.zip(call.rows()) {
                while there.next_if(|(_, other)| other.row < row.row).is_some() {}
                if let Some((other, _)) = there.next_if(|(_, other)| other.row == row.row) {
                    rows.push((place as u32, other as u32));
                }
            }
        }
    }
}

/// Counts the followers of one expert after the other, so that memory grows with experts and rows,
/// not with the square of the experts.
struct Counter {
    /// Where the entries of each expert end in `order`, after [`Counter::sort`].
    ends: Vec<u32>,
    /// Indices of coupled rows, expert by expert.
    order: Vec<u32>,
    /// Count of each follower of the expert in hand; all 0 between experts.
    counts: Vec<u64>,
    followers: Vec<Follower>,
}

impl Counter {
    fn new(experts: usize) -> Counter {
        let (ends, counts) = (vec![0; experts], vec![0; experts]);
        Counter { ends, order: Vec::new(), counts, followers: Vec::new() }
    }

    /// Sorts coupled rows by the experts of the earlier layer.
    fn sort(&mut self, trace: &Trace, rows: &[(u32, u32)]) {
        let experts = |row: u32| trace.row(row as usize).experts;
        self.ends.fill(0);
        for expert in rows.iter().flat_map(|(row, _)| experts(*row)) {
            self.ends[*expert as usize] += 1;
        }
        // Ends become starts, and ends again as entries are put in their places.
        let mut total = 0;
        for end in &mut self.ends {
            total += *end;
            *end = total - *end;
        }
        self.order.clear();
        self.order.resize(total as usize, 0);
        for (at, (row, _)) in rows.iter().enumerate() {
            for expert in experts(*row) {
                let next = &mut self.ends[*expert as usize];
                self.order[*next as usize] = at as u32;
                *next += 1;
            }
        }
    }

    /// The most frequent followers of an expert in the rows that were sorted.
    fn followers(&mut self, trace: &Trace, rows: &[(u32, u32)], expert: u32) -> &[Follower] {
        let expert = expert as usize;
        let start = if expert == 0 { 0 } else { self.ends[expert - 1] as usize };
        self.followers.clear();
        for at in &self.order[start..self.ends[expert] as usize] {
            let (_, later) = rows[*at as usize];
            for follower in trace.row(later as usize).experts {
                let count = &mut self.counts[*follower as usize];
                if *count == 0 {
                    self.followers.push(Follower { expert: *follower, count: 0 });
                }
                *count += 1;
            }
        }
        for follower in &mut self.followers {
            follower.count = std::mem::take(&mut self.counts[follower.expert as usize]);
        }
        self.followers.sort_unstable_by(by_count);
        self.followers.truncate(FOLLOWERS_MAX);
        &self.followers
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trace(text: &str) -> Trace {
        Trace::parse(Path::new("trace"), text.as_bytes(), RouteShape::ANY).unwrap()
    }

    fn parse(text: &str) -> Result<Pairs, SidecarError> {
        Pairs::parse(Path::new("pairs"), text.as_bytes(), RouteShape::ANY)
    }

    fn predict(pairs: &Pairs, layer: usize, routed: &[u32], top_k: usize) -> Vec<u32> {
        let mut out = vec![99];
        pairs.predict(layer, 1, routed, top_k, &mut Workspace::default(), &mut out);
        out
    }

    #[test]
    fn rows_are_coupled_within_a_pass_and_nowhere_else() {
        let pairs = Pairs::of(&trace(
            "0 0 1 5:1 6:1\n0 1 1 7:1\n1 0 2 8:1\n1 1 2 9:1\n2 0 3 4:1\n2 1 3 3:1\n\
             3 0 1 5:1\n4 0 2 8:1 9:1\n\
             5 0 2 1:1\n6 0 3 2:1\n\
             7 0 1 5:1\n8 0 2 6:1\n8 1 2 6:1\n9 0 3 6:1\n",
        ));
        assert_eq!(
            pairs.to_text(),
            "COLIPAIRS 1 9\n\
             1 1 5 8:2 9:1\n1 1 6 8:1\n1 1 7 9:1\n\
             1 2 5 4:1 6:1\n1 2 6 4:1\n1 2 7 3:1\n\
             2 1 1 2:1\n2 1 8 4:1\n2 1 9 3:1\n"
        );
        assert_eq!((pairs.lines(), pairs.experts()), (9, 6));
        // A repeated layer begins a pass, and rows are coupled by their index.
        let pairs = Pairs::of(&trace("0 0 1 5:1\n1 0 1 5:1\n2 0 2 6:1\n"));
        assert_eq!(pairs.followers(1, 1, 5), [Follower { expert: 6, count: 1 }]);
        let pairs = Pairs::of(&trace("0 0 1 5:1\n0 2 1 6:1\n1 1 2 7:1\n1 2 2 8:1\n"));
        assert_eq!(pairs.to_text(), "COLIPAIRS 1 1\n1 1 6 8:1\n");
        // Layers without experts in between are not skipped over.
        assert_eq!(Pairs::of(&trace("0 0 1 5:1\n1 0 4 5:1\n")).lines(), 0);
        assert_eq!(Pairs::of(&Trace::default()).to_text(), "COLIPAIRS 1 0\n");
    }

    #[test]
    fn sixteen_followers_are_kept_ties_to_the_lower_id() {
        let text: String = (0..20)
            .rev()
            .chain([19, 19, 3])
            .enumerate()
            .map(|(at, expert)| format!("{} 0 0 1:1\n{} 0 1 {expert}:1\n", 2 * at, 2 * at + 1))
            .collect();
        let trace = trace(&text);
        let pairs = Pairs::of(&trace);
        let followers: Vec<(u32, u64)> =
            pairs.followers(0, 1, 1).iter().map(|f| (f.expert, f.count)).collect();
        let ties = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14].map(|expert| (expert, 1));
        assert_eq!(followers[..2], [(19, 3), (3, 2)]);
        assert_eq!(followers[2..], ties);
        assert_eq!(predict(&pairs, 0, &[1], 3), [19, 3, 0]);
        assert_eq!(pairs.recall(&trace, 1, 2), Recall { hits: 5, selections: 23 });
        assert_eq!(pairs.recall(&trace, 2, 2).share(), None);
    }

    /// The counts by definition: every two calls of a trace, and every pair of their rows.
    fn slow(trace: &Trace, layer: usize, distance: usize, expert: u32) -> Vec<(u32, u64)> {
        let calls: Vec<TraceCall<'_>> = trace.calls().collect();
        let mut counts = std::collections::BTreeMap::new();
        for (at, call) in calls.iter().enumerate().filter(|(_, call)| call.layer() == layer) {
            let pass = calls[at..].windows(2).take_while(|two| two[0].layer() < two[1].layer());
            let next = pass.map(|two| two[1]).find(|next| next.layer() == layer + distance);
            let Some(next) = next.filter(|next| next.rows().len() == call.rows().len()) else {
                continue;
            };
            for (a, b) in call.rows().flat_map(|a| next.rows().map(move |b| (a, b))) {
                if a.row == b.row && a.experts.contains(&expert) {
                    b.experts.iter().for_each(|expert| *counts.entry(*expert).or_insert(0) += 1);
                }
            }
        }
        let mut counts: Vec<(u32, u64)> = counts.into_iter().collect();
        counts.sort_by_key(|(expert, count)| (u64::MAX - count, *expert));
        counts.truncate(FOLLOWERS_MAX);
        counts
    }

    /// A trace of passes over layers 2 to 6 with one to four rows, three of 40 experts each.
    fn random_trace() -> Trace {
        let mut state = 7u64;
        let mut below = |bound: u64| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (state >> 33) % bound
        };
        let mut text = String::new();
        let mut call = 0;
        for _ in 0..40 {
            let rows = below(4) + 1;
            for layer in 2..7 {
                let rows = if below(8) == 0 { 1 } else { rows };
                for row in 0..rows {
                    let first = below(40);
                    let (second, third) = ((first + 1 + below(12)) % 40, (first + 20) % 40);
                    let _ = writeln!(text, "{call} {row} {layer} {first}:1 {second}:1 {third}:1");
                }
                call += 1;
            }
        }
        trace(&text)
    }

    #[test]
    fn counts_are_those_of_the_definition_and_survive_the_text() {
        let trace = random_trace();
        let pairs = Pairs::of(&trace);
        let mut lines = 0;
        for layer in 0..8 {
            for (distance, expert) in (1..=2).flat_map(|d| (0..40).map(move |e| (d, e))) {
                let followers = pairs.followers(layer, distance, expert);
                let found: Vec<(u32, u64)> =
                    followers.iter().map(|f| (f.expert, f.count)).collect();
                assert_eq!(found, slow(&trace, layer, distance, expert));
                lines += usize::from(!followers.is_empty());
            }
        }
        assert_eq!(lines, pairs.lines());
        assert!(lines > 100, "{lines}");
        assert_eq!(parse(&pairs.to_text()).unwrap(), pairs);
        let recall = pairs.recall(&trace, 1, trace.top_k());
        assert!(recall.hits > 0 && recall.hits < recall.selections, "{recall:?}");
        assert_eq!(pairs.recall(&trace, 1, 0).hits, 0);
    }

    #[test]
    fn a_prediction_sums_counts_over_the_routed_experts() {
        let pairs = parse(
            "COLIPAIRS 1 3\n0 1 1 8:5 9:4 2:1\n0 1 2 9:2 2:1 7:1\n\
             0 1 3 5:18446744073709551615\n",
        )
        .unwrap();
        assert_eq!(predict(&pairs, 0, &[1], 2), [8, 9]);
        assert_eq!(predict(&pairs, 0, &[1, 2], 9), [9, 8, 2, 7]);
        assert_eq!(predict(&pairs, 0, &[3, 3, 1], 2), [5, 8]);
        assert!(predict(&pairs, 0, &[4, u32::MAX], 2).is_empty());
        assert!(predict(&pairs, 1, &[1], 2).is_empty());
        for distance in [0, 2, 3, usize::MAX] {
            assert!(pairs.followers(0, distance, 1).is_empty());
        }
    }

    #[test]
    fn lines_in_any_order_and_other_line_ends_are_accepted() {
        let pairs = parse("COLIPAIRS 1 2\r\n1 2 0 3:1\r\n1 1 0 3:1").unwrap();
        assert_eq!(pairs.to_text(), "COLIPAIRS 1 2\n1 1 0 3:1\n1 2 0 3:1\n");
        assert_eq!(parse("COLIPAIRS 1 0").unwrap(), Pairs::default());
    }

    #[test]
    fn wrong_tables_are_refused_with_file_line_and_facts() {
        let cases = [
            ("", "line 1: expected COLIPAIRS 1"),
            ("PAIRS 1 0\n", "line 1: expected COLIPAIRS 1"),
            ("COLIPAIRS\n", "line 1"),
            ("COLIPAIRS x 0\n", "line 1"),
            ("COLIPAIRS 1\n", "line 1"),
            ("COLIPAIRS 1 0 0\n", "line 1"),
            ("COLIPAIRS 1 -1\n", "line 1"),
            ("COLIPAIRS 2 0\n", "version 2"),
            ("COLIPAIRS 1 524289\n", "more than 524288 lines"),
            ("COLIPAIRS 1 2\n0 1 0 1:1\n", "line 3: expected 2 lines"),
            ("COLIPAIRS 1 1\n", "the end after 0"),
            ("COLIPAIRS 1 0\n0 1 0 1:1\n", "line 2: expected the end"),
            ("COLIPAIRS 1 1\n0 1 0 1:1\n\n", "line 3: expected the end"),
            ("COLIPAIRS 1 1\n\n0 1 0 1:1\n", "line 2: expected <layer>"),
            ("COLIPAIRS 1 1\n0 1 0\n", "line 2: expected <layer>"),
            ("COLIPAIRS 1 1\n0 0 0 1:1\n", "a distance of 1 or 2"),
            ("COLIPAIRS 1 1\n0 3 0 1:1\n", "a distance of 1 or 2"),
            ("COLIPAIRS 1 1\n1031 1 0 1:1\n", "followers below layer 1032"),
            ("COLIPAIRS 1 1\n1032 1 0 1:1\n", "a layer below 1032"),
            ("COLIPAIRS 1 1\n0 1 65536 1:1\n", "an expert below 65536"),
            ("COLIPAIRS 1 1\n0 1 0 65536:1\n", "a follower below 65536"),
            ("COLIPAIRS 1 1\n0 1 0 1\n", "line 2: expected <layer>"),
            ("COLIPAIRS 1 1\n0 1 0 1:0\n", "at least 1"),
            ("COLIPAIRS 1 1\n0 1 0 1:18446744073709551616\n", "64-bit"),
            ("COLIPAIRS 1 1\n0 1 0 1:1 2:2\n", "the most frequent follower first"),
            ("COLIPAIRS 1 1\n0 1 0 2:1 1:1\n", "the most frequent follower first"),
            ("COLIPAIRS 1 1\n0 1 0 2:1 2:1\n", "the most frequent follower first"),
            ("COLIPAIRS 1 1\n0 1 0 2:2 2:1\n", "each follower once"),
            ("COLIPAIRS 1 3\n0 1 0 1:1\n0 1 1 1:1\n0 1 0 1:1\n", "line 4: expected one line"),
        ];
        for (text, needle) in cases {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with("pairs") && error.contains(needle), "{text:?}: {error}");
        }
        let many: String = (0..17).map(|expert| format!(" {expert}:1")).collect();
        let error = parse(&format!("COLIPAIRS 1 1\n0 1 0{many}\n")).unwrap_err().to_string();
        assert!(error.contains("more than 16 followers"), "{error}");
        let longest: String = (0..16).map(|at| format!(" {}:{}", 65_520 + at, u64::MAX)).collect();
        let shape = RouteShape { layers: 1032, experts: 65_536 };
        let text = format!("COLIPAIRS 1 1\n1029 2 65535{longest}\n");
        Pairs::parse(Path::new("pairs"), text.as_bytes(), shape).unwrap();
    }

    #[test]
    fn a_table_cut_anywhere_is_refused_or_whole() {
        let text = "COLIPAIRS 1 3\n0 1 10 11:12 13:4\n0 2 7 6:5\n10 1 0 4:13\n";
        // A count that lost digits is a count.
        for cut in 0..text.len() - "3\n".len() {
            assert!(parse(&text[..cut]).is_err(), "{cut}");
        }
    }
}
