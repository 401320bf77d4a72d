//! Which experts of a layer are worth keeping: how often they were chosen, older choices counting
//! less, per byte.
//!
//! A call of a layer adds the square root of a quarter of the rows that chose an expert to its
//! score, at least one. A prompt says which experts the answer will want, but its rows come at once
//! and say less than as many tokens one after another. The score is halved every [`HALF_LIFE_ROWS`]
//! rows of its layer. Kept as a logarithm that grows with the layer's clock, it never has to be
//! aged: only the order matters, and time changes all alike. Scores outlive residence, so an expert
//! that comes back is known, and one that comes for the first time is the first to go: that is the
//! admission rule. Experts that may go stand in buckets, the least recently chosen of a bucket
//! first; every operation touches a constant number of them.

/// Rows of a layer after which a choice counts half.
pub const HALF_LIFE_ROWS: f64 = 128.0;
/// Buckets per doubling of the score. Coarser ones let the least recent of a bucket go though it is
/// worth more than others.
const PER_OCTAVE: f64 = 256.0;
/// How much more an expert is worth whose score is twice as high.
pub const TWICE: i64 = PER_OCTAVE as i64;
/// Buckets: 16 octaves, a score that has not grown for 2048 rows. What is colder keeps the order in
/// which it fell below.
const BUCKETS: usize = 4096;
/// A score that nothing has.
const NEVER: f64 = f64::NEG_INFINITY;
/// How cold a layer is from which nothing can go.
pub const NOTHING: i64 = i64::MAX;

/// What a call adds to the score of an expert that so many of its rows chose.
fn weight(rows: usize) -> f64 {
    (rows as f64 / 4.0).max(1.0).sqrt()
}

/// Of layers with their floors, the one whose coldest expert is worth least.
pub fn coldest_layer(floors: impl Iterator<Item = (usize, i64)>) -> Option<usize> {
    floors.filter(|(_, floor)| *floor != NOTHING).min_by_key(|(_, floor)| *floor).map(|at| at.0)
}

/// Scores of a layer's experts and the order in which those that may go would.
#[derive(Debug)]
pub struct LayerPolicy {
    /// Rows seen, in half-lives.
    now: f64,
    /// Logarithm of each expert's score, plus `now` when it was last chosen.
    keys: Vec<f64>,
    /// Logarithm of each expert's bytes.
    prices: Vec<f64>,
    /// Circular lists: experts, then one head per bucket. A lone element is its own neighbour.
    links: Vec<Link>,
    /// Buckets that may have elements.
    used: [u64; BUCKETS / 64],
    /// Absolute number of the highest bucket used so far; the ring holds it and those below.
    top: i64,
}

#[derive(Clone, Copy, Debug)]
struct Link {
    before: u32,
    after: u32,
}

impl LayerPolicy {
    /// A layer whose experts take so many bytes each; all scores are zero and nothing can go.
    pub fn new(bytes: impl Iterator<Item = u64>) -> LayerPolicy {
        let prices: Vec<f64> = bytes.map(|bytes| (bytes.max(1) as f64).log2()).collect();
        let alone = |at: usize| Link { before: at as u32, after: at as u32 };
        LayerPolicy {
            now: 0.0,
            keys: vec![NEVER; prices.len()],
            links: (0..prices.len() + BUCKETS).map(alone).collect(),
            prices,
            used: [0; BUCKETS / 64],
            top: i64::MIN,
        }
    }

    /// Lets the layer's clock go on by rows.
    pub fn advance(&mut self, rows: usize) {
        self.now += rows as f64 / HALF_LIFE_ROWS;
    }

    /// Counts a call in which rows chose an expert.
    pub fn touch(&mut self, expert: u32, rows: usize) {
        let at = expert as usize;
        let score = (self.keys[at] - self.now).exp2() + weight(rows);
        self.keys[at] = score.log2() + self.now;
        if self.is_linked(expert) {
            self.link(expert);
        }
    }

    /// Sets an expert's score, as if it had been earned by now.
    pub fn seed(&mut self, expert: u32, score: f64) {
        self.keys[expert as usize] = score.log2() + self.now;
        if self.is_linked(expert) {
            self.link(expert);
        }
    }

    /// The expert's score now.
    pub fn score(&self, expert: u32) -> f64 {
        (self.keys[expert as usize] - self.now).exp2()
    }

    /// How much an expert is worth keeping, comparable between layers: the logarithm of its
    /// score per byte, in buckets.
    pub fn worth(&self, expert: u32) -> i64 {
        self.relative(self.bucket(expert))
    }

    fn relative(&self, bucket: i64) -> i64 {
        bucket - (self.now * PER_OCTAVE).floor() as i64
    }

    fn bucket(&self, expert: u32) -> i64 {
        let at = expert as usize;
        let key = self.keys[at].max(self.now - BUCKETS as f64 / PER_OCTAVE);
        ((key - self.prices[at]) * PER_OCTAVE).floor() as i64
    }

    fn head(&self, bucket: i64) -> u32 {
        (self.keys.len() + bucket.rem_euclid(BUCKETS as i64) as usize) as u32
    }

    fn mark(&mut self, bucket: i64, used: bool) {
        let at = bucket.rem_euclid(BUCKETS as i64) as usize;
        let bit = 1 << (at % 64);
        self.used[at / 64] = self.used[at / 64] & !bit | if used { bit } else { 0 };
    }

    /// Whether an expert may go.
    pub fn is_linked(&self, expert: u32) -> bool {
        self.links[expert as usize].after != expert
    }

    /// Lets an expert go when it is the least worth, or puts it where its score has come to.
    pub fn link(&mut self, expert: u32) {
        self.unlink(expert);
        let bucket = self.bucket(expert);
        self.raise_top(bucket);
        let bucket = bucket.max(self.top - (BUCKETS as i64 - 1));
        self.mark(bucket, true);
        let head = self.head(bucket);
        let last = self.links[head as usize].before;
        self.links[expert as usize] = Link { before: last, after: head };
        self.links[last as usize].after = expert;
        self.links[head as usize].before = expert;
    }

    /// Keeps an expert whatever its score.
    pub fn unlink(&mut self, expert: u32) {
        let Link { before, after } = self.links[expert as usize];
        self.links[before as usize].after = after;
        self.links[after as usize].before = before;
        self.links[expert as usize] = Link { before: expert, after: expert };
    }

    /// Moves the ring up to hold `bucket`; what would fall out of it joins the lowest that stays.
    fn raise_top(&mut self, bucket: i64) {
        if self.top == i64::MIN {
            self.top = bucket;
        }
        if bucket <= self.top {
            return;
        }
        let size = BUCKETS as i64;
        let (old_lowest, lowest) = (self.top - (size - 1), bucket - (size - 1));
        self.top = bucket;
        // Far beyond the ring everything joins one bucket; each is looked at once.
        for falling in (old_lowest..lowest.min(old_lowest + size)).rev() {
            let from = self.head(falling);
            self.mark(falling, false);
            let Link { before: last, after: first } = self.links[from as usize];
            if first == from {
                continue;
            }
            self.links[from as usize] = Link { before: from, after: from };
            // In front: they are worth less than what is there.
            let to = self.head(lowest);
            let next = self.links[to as usize].after;
            self.links[to as usize].after = first;
            self.links[first as usize].before = to;
            self.links[last as usize].after = next;
            self.links[next as usize].before = last;
            self.mark(lowest, true);
        }
    }

    /// The least worth expert that may go and is `free`, and how much it is worth.
    pub fn coldest(&mut self, free: impl Fn(u32) -> bool) -> Option<(u32, i64)> {
        let mut bucket = self.lowest_used()?;
        while bucket <= self.top {
            let head = self.head(bucket);
            let mut at = self.links[head as usize].after;
            while at != head {
                if free(at) {
                    return Some((at, self.relative(bucket)));
                }
                at = self.links[at as usize].after;
            }
            bucket = self.next_used(bucket + 1)?;
        }
        None
    }

    /// How much the least worth expert that may go is worth; [`NOTHING`] without any.
    pub fn floor(&mut self) -> i64 {
        self.lowest_used().map_or(NOTHING, |bucket| self.relative(bucket))
    }

    fn lowest_used(&mut self) -> Option<i64> {
        if self.top == i64::MIN {
            return None;
        }
        self.next_used(self.top - (BUCKETS as i64 - 1))
    }

    /// The lowest bucket from `start` on that has elements.
    fn next_used(&mut self, start: i64) -> Option<i64> {
        let mut bucket = start;
        while bucket <= self.top {
            let at = bucket.rem_euclid(BUCKETS as i64) as usize;
            let word = self.used[at / 64] >> (at % 64);
            if word == 0 {
                // On to the next word of marks.
                bucket += 64 - (at % 64) as i64;
                continue;
            }
            bucket += i64::from(word.trailing_zeros());
            if bucket > self.top {
                return None;
            }
            let head = self.head(bucket);
            if self.links[head as usize].after != head {
                return Some(bucket);
            }
            self.mark(bucket, false);
            bucket += 1;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layer(experts: usize) -> LayerPolicy {
        LayerPolicy::new((0..experts).map(|_| 4096))
    }

    #[test]
    fn the_least_chosen_goes_first_and_the_least_recent_of_equals() {
        let mut policy = layer(5);
        for (expert, rows) in [(0, 36), (1, 1), (2, 64), (3, 1)] {
            policy.touch(expert, rows);
            policy.link(expert);
        }
        assert_eq!(policy.coldest(|_| true).unwrap().0, 1);
        assert_eq!(policy.coldest(|expert| expert != 1).unwrap().0, 3);
        assert_eq!(policy.coldest(|expert| expert == 2).unwrap().0, 2);
        policy.touch(1, 1);
        assert_eq!(policy.coldest(|_| true).unwrap().0, 3);
        policy.unlink(3);
        assert_eq!(policy.coldest(|_| true).unwrap().0, 1);
        assert!(!policy.is_linked(3) && !policy.is_linked(4) && policy.is_linked(0));
    }

    #[test]
    fn old_choices_count_less_and_an_expert_that_comes_back_is_known() {
        let mut policy = layer(2);
        policy.touch(0, 400);
        policy.link(0);
        policy.unlink(0);
        policy.advance(HALF_LIFE_ROWS as usize * 3);
        policy.touch(1, 1);
        policy.link(1);
        policy.link(0);
        assert!((policy.score(0) - 1.25).abs() < 1e-9);
        assert_eq!(policy.coldest(|_| true).unwrap().0, 1);
        policy.touch(1, 1);
        assert_eq!(policy.coldest(|_| true).unwrap().0, 0);
    }

    #[test]
    fn bytes_are_a_price() {
        let mut policy = LayerPolicy::new([1000, 8000].into_iter());
        policy.touch(0, 1);
        policy.touch(1, 16);
        policy.link(0);
        policy.link(1);
        assert_eq!(policy.coldest(|_| true).unwrap().0, 1);
        assert!(policy.worth(0) > policy.worth(1));
    }

    #[test]
    fn a_clock_that_runs_far_ahead_keeps_the_order_and_loses_nobody() {
        let mut policy = layer(64);
        for expert in 0..64 {
            policy.touch(expert, 1 + expert as usize);
            policy.link(expert);
            policy.advance(HALF_LIFE_ROWS as usize * 7);
        }
        // Chosen long ago, all alike by now, in the order in which they were chosen.
        policy.advance(HALF_LIFE_ROWS as usize * 5000);
        policy.touch(63, 1);
        let mut order = Vec::new();
        while let Some((expert, _)) = policy.coldest(|_| true) {
            order.push(expert);
            policy.unlink(expert);
        }
        assert_eq!(order, (0..64).collect::<Vec<_>>());
        assert_eq!(policy.floor(), NOTHING);
    }

    #[test]
    fn the_order_is_that_of_the_scores_whatever_happens() {
        let mut policy = layer(200);
        let mut state = 9u64;
        let mut noise = |bound: u64| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        };
        let mut linked = std::collections::BTreeSet::new();
        for _ in 0..20_000 {
            let expert = noise(200) as u32;
            match noise(4) {
                0 => policy.touch(expert, 1 + noise(5) as usize),
                1 => {
                    policy.link(expert);
                    linked.insert(expert);
                }
                2 => {
                    policy.unlink(expert);
                    linked.remove(&expert);
                }
                _ => policy.advance(noise(300) as usize),
            }
            let least = linked.iter().map(|expert| policy.worth(*expert)).min();
            match (policy.coldest(|_| true), least) {
                (None, None) => {}
                // A bucket moves with the clock.
                (Some((found, _)), Some(least)) => {
                    assert!(linked.contains(&found));
                    assert!(policy.worth(found) <= least + 1, "{} {least}", policy.worth(found));
                }
                (found, least) => panic!("{found:?} {least:?}"),
            }
        }
    }
}
