//! Replays of a route trace against cache policies: the one of the cache, with the cache's own
//! code, beside others that show what is left to gain.
//!
//! The unit is an expert per MoE call, asked for once however many rows chose it, as the cache is
//! asked. All experts count as one size. The expert that is being computed does not count: when it
//! has been, the policy says which of the others and it goes. The cache has such experts among its
//! bytes, as many as are read or held at once: it does what a replay of so many fewer does.

use std::collections::{BTreeSet, HashMap};

use crate::cache::policy::{LayerPolicy, NOTHING, coldest_layer};
use crate::trace::Trace;

/// A rule for what goes when there is no room.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Policy {
    /// Least recently used.
    Lru,
    /// Least often used, counted for ever; of equals the least recently used.
    Lfu,
    /// That of the cache.
    Ours,
    /// The experts with the most uses of the whole trace, placed before it begins.
    Static,
    /// Whatever is used again latest: no policy without foresight can do better.
    Belady,
}

impl Policy {
    /// Every policy, as they are listed.
    pub const ALL: [Policy; 5] =
        [Policy::Lru, Policy::Lfu, Policy::Ours, Policy::Static, Policy::Belady];

    /// Name in figures.
    pub const fn name(self) -> &'static str {
        match self {
            Policy::Lru => "lru",
            Policy::Lfu => "lfu",
            Policy::Ours => "ours",
            Policy::Static => "static",
            Policy::Belady => "belady",
        }
    }
}

/// One MoE call: each distinct expert with the rows that chose it.
#[derive(Clone, Debug)]
pub struct Call {
    /// The layer.
    pub layer: usize,
    /// Rows of the call.
    pub rows: usize,
    /// Experts, ascending, and how many rows chose each.
    pub experts: Vec<(u32, usize)>,
}

/// The calls of a run.
#[derive(Clone, Debug, Default)]
pub struct Replay {
    layers: usize,
    experts: usize,
    calls: Vec<Call>,
}

/// An expert of the model: layer and number.
type Id = (usize, u32);

impl Replay {
    /// A run of a model with so many experts per layer, of those layers that the calls name.
    pub fn new(experts: usize, calls: Vec<Call>) -> Replay {
        let layers = calls.iter().map(|call| call.layer + 1).max().unwrap_or(0);
        Replay { layers, experts, calls }
    }

    /// The run that a trace recorded.
    pub fn of(trace: &Trace) -> Replay {
        let call = |call: crate::trace::TraceCall<'_>| {
            let mut chosen: Vec<u32> =
                call.rows().flat_map(|row| row.experts.iter().copied()).collect();
            chosen.sort_unstable();
            let mut experts: Vec<(u32, usize)> = Vec::new();
            for expert in chosen {
                match experts.last_mut() {
                    Some((last, rows)) if *last == expert => *rows += 1,
                    _ => experts.push((expert, 1)),
                }
            }
            Call { layer: call.layer(), rows: call.rows().len(), experts }
        };
        Replay::new(trace.experts(), trace.calls().map(call).collect())
    }

    /// Experts asked for, over all calls.
    pub fn uses(&self) -> u64 {
        self.calls.iter().map(|call| call.experts.len() as u64).sum()
    }

    /// Experts of all layers that have any.
    pub fn all_experts(&self) -> usize {
        let layers: BTreeSet<usize> = self.calls.iter().map(|call| call.layer).collect();
        layers.len() * self.experts
    }

    /// Uses that a cache of so many experts answers from memory.
    pub fn hits(&self, policy: Policy, slots: usize) -> u64 {
        match policy {
            Policy::Ours => self.ours(slots),
            Policy::Static => self.placed(slots),
            Policy::Lru | Policy::Lfu | Policy::Belady => self.ordered(policy, slots),
        }
    }

    fn ours(&self, slots: usize) -> u64 {
        let layer = || LayerPolicy::new((0..self.experts).map(|_| 1));
        let mut layers: Vec<LayerPolicy> = (0..self.layers).map(|_| layer()).collect();
        let mut floors = vec![NOTHING; self.layers];
        let mut resident = vec![false; self.layers * self.experts];
        let (mut held, mut hits) = (0, 0);
        for call in &self.calls {
            let at = call.layer;
            layers[at].advance(call.rows);
            call.experts.iter().for_each(|(expert, rows)| layers[at].touch(*expert, *rows));
            floors[at] = layers[at].floor();
            for (expert, _) in &call.experts {
                let place = at * self.experts + *expert as usize;
                if resident[place] {
                    hits += 1;
                    continue;
                }
                resident[place] = true;
                held += 1;
                layers[at].link(*expert);
                floors[at] = layers[at].floor();
                if held > slots
                    && let Some(layer) = coldest_layer(floors.iter().copied().enumerate())
                    && let Some((victim, _)) = layers[layer].coldest(|_| true)
                {
                    layers[layer].unlink(victim);
                    floors[layer] = layers[layer].floor();
                    resident[layer * self.experts + victim as usize] = false;
                    held -= 1;
                }
            }
        }
        hits
    }

    /// Hits of the best placement in hindsight.
    fn placed(&self, slots: usize) -> u64 {
        let mut uses: HashMap<Id, u64> = HashMap::new();
        for call in &self.calls {
            for (expert, _) in &call.experts {
                *uses.entry((call.layer, *expert)).or_default() += 1;
            }
        }
        let mut uses: Vec<u64> = uses.into_values().collect();
        uses.sort_unstable_by(|a, b| b.cmp(a));
        uses.iter().take(slots).sum()
    }

    /// Hits of a policy that drops the least of an order.
    fn ordered(&self, policy: Policy, slots: usize) -> u64 {
        let next = if policy == Policy::Belady { self.next_uses() } else { Vec::new() };
        let mut order: BTreeSet<((u64, u64), Id)> = BTreeSet::new();
        let mut keys: HashMap<Id, (u64, u64)> = HashMap::new();
        let mut counts: HashMap<Id, u64> = HashMap::new();
        let (mut hits, mut at) = (0, 0);
        for (time, call) in self.calls.iter().enumerate() {
            for (expert, _) in &call.experts {
                let id = (call.layer, *expert);
                let count = counts.entry(id).or_default();
                *count += 1;
                let key = match policy {
                    Policy::Lfu => (*count, time as u64),
                    Policy::Belady => (u64::MAX - next[at], 0),
                    Policy::Lru | Policy::Ours | Policy::Static => (time as u64, 0),
                };
                at += 1;
                if let Some(old) = keys.insert(id, key) {
                    hits += 1;
                    order.remove(&(old, id));
                }
                order.insert((key, id));
                if keys.len() > slots
                    && let Some((_, victim)) = order.pop_first()
                {
                    keys.remove(&victim);
                }
            }
        }
        hits
    }

    /// When each use's expert is used next, in calls; `u64::MAX` for never.
    fn next_uses(&self) -> Vec<u64> {
        let mut next = vec![u64::MAX; self.uses() as usize];
        let mut seen: HashMap<Id, u64> = HashMap::new();
        let mut at = next.len();
        for (time, call) in self.calls.iter().enumerate().rev() {
            for (expert, _) in call.experts.iter().rev() {
                at -= 1;
                if let Some(later) = seen.insert((call.layer, *expert), time as u64) {
                    next[at] = later;
                }
            }
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::sidecar::RouteShape;

    fn call(layer: usize, experts: &[u32]) -> Call {
        Call { layer, rows: 1, experts: experts.iter().map(|expert| (*expert, 1)).collect() }
    }

    #[test]
    fn policies_do_what_their_names_say() {
        let calls = [0, 1, 0, 2, 0, 1, 3, 0, 1].map(|expert| call(0, &[expert]));
        let replay = Replay::new(4, calls.to_vec());
        assert_eq!(replay.uses(), 9);
        // LRU has 0 twice, then 2 and 3 push out what comes back.
        assert_eq!(replay.hits(Policy::Lru, 2), 2);
        assert_eq!(replay.hits(Policy::Static, 2), 4 + 3);
        // With foresight 2 and 3 never come in.
        assert_eq!(replay.hits(Policy::Belady, 2), 5);
        assert!((3..=5).contains(&replay.hits(Policy::Lfu, 2)));
        assert!((3..=5).contains(&replay.hits(Policy::Ours, 2)));
        for policy in Policy::ALL {
            assert_eq!(replay.hits(policy, 4), if policy == Policy::Static { 9 } else { 5 });
            assert_eq!(replay.hits(policy, 0), 0);
        }
    }

    /// A trace whose layers choose `top_k` of `experts` by Zipf's law, each in an order of its own.
    fn zipf(exponent: f64, layers: usize, experts: usize, top_k: usize, tokens: usize) -> Replay {
        let mut state = 0x9e37_79b9_7f4a_7c15u64;
        let mut uniform = move || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 11) as f64 / (1u64 << 53) as f64
        };
        let mut weights = vec![vec![0.0; experts]; layers];
        for weights in &mut weights {
            let mut order: Vec<usize> = (0..experts).collect();
            for at in (1..experts).rev() {
                order.swap(at, (uniform() * (at + 1) as f64) as usize);
            }
            for (rank, expert) in order.into_iter().enumerate() {
                weights[expert] = (rank as f64 + 1.0).powf(-exponent);
            }
        }
        let mut calls = Vec::new();
        for _ in 0..tokens {
            for (layer, weights) in weights.iter().enumerate() {
                let mut left = weights.clone();
                let mut chosen: Vec<u32> = (0..top_k)
                    .map(|_| {
                        let mut at = uniform() * left.iter().sum::<f64>();
                        let found = left.iter().position(|weight| {
                            at -= weight;
                            at < 0.0
                        });
                        let found = found.unwrap_or_else(|| {
                            left.iter().rposition(|weight| *weight > 0.0).unwrap_or(0)
                        });
                        left[found] = 0.0;
                        found as u32
                    })
                    .collect();
                chosen.sort_unstable();
                calls.push(call(layer, &chosen));
            }
        }
        Replay::new(experts, calls)
    }

    #[test]
    fn on_zipf_like_traces_ours_reaches_97_percent_of_the_best_placement_in_hindsight() {
        for (exponent, experts, layers) in
            [(0.6, 64, 6), (0.9, 64, 6), (1.2, 64, 6), (0.9, 24, 8), (1.2, 128, 4)]
        {
            let replay = zipf(exponent, layers, experts, 8, 4000);
            for percent in [10, 25, 50] {
                let slots = layers * experts * percent / 100;
                let ours = replay.hits(Policy::Ours, slots) as f64;
                let best = replay.hits(Policy::Static, slots) as f64;
                let belady = replay.hits(Policy::Belady, slots) as f64;
                println!(
                    "zipf {exponent} of {experts}, {percent} %: ours {:.4} of static, {:.4} of \
                     belady, lru {:.4} of static",
                    ours / best,
                    ours / belady,
                    replay.hits(Policy::Lru, slots) as f64 / best
                );
                assert!(
                    ours >= 0.97 * best,
                    "zipf {exponent} of {experts}, {percent} %: {ours} of {best}"
                );
            }
        }
    }

    #[test]
    fn on_traces_of_the_bundled_model_ours_is_above_lru_and_lfu() {
        let names = ["prose", "code", "letter", "long-prompt"];
        for name in names.map(|name| format!("hummingbird-{name}.txt")) {
            let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fixtures/routes");
            let trace = Trace::load(&path.join(&name), RouteShape::ANY).unwrap();
            let replay = Replay::of(&trace);
            for percent in [10, 25, 50] {
                let slots = replay.all_experts() * percent / 100;
                let [lru, lfu, ours, _, belady] = Policy::ALL.map(|p| replay.hits(p, slots));
                println!("{name}, {percent} %: {ours} of {belady} with foresight");
                assert!(ours > lru, "{name}, {percent} %: {ours}, LRU {lru}");
                assert!(ours > lfu, "{name}, {percent} %: {ours}, LFU {lfu}");
                assert!(ours < belady);
            }
        }
    }
}
