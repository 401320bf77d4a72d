//! Experts that stay with the coordinator: those chosen most often, as many as fit in its memory
//! and as it can compute while it would wait for workers. No sockets, no clocks: times are
//! arguments.

use std::time::Duration;

/// Usual number of MoE calls after which the number is looked at again, and counts are halved.
pub const WINDOW_CALLS: u64 = 512;
/// Share of the time for routed experts that waiting may be before more stay here, and below which
/// fewer do.
const WAIT_MOST: f64 = 0.2;
const WAIT_LEAST: f64 = 0.05;
/// Share of the memory for experts that those may take: workers that fail leave others to this
/// machine.
const MEMORY_SHARE: f64 = 0.75;

/// What is known of the experts.
#[derive(Clone, Debug)]
pub struct Hot {
    /// Calls that chose each expert, older ones counting less, by layer.
    counts: Vec<Vec<f32>>,
    stays: Vec<Vec<bool>>,
    /// Experts that stay, at most now, and ever.
    limit: usize,
    limit_max: usize,
    calls: u64,
    window_calls: u64,
    computed: Duration,
    waited: Duration,
}

impl Hot {
    /// For layers of so many experts each, `fit` of which are in memory at a time; looked at again
    /// after every `window_calls`.
    pub fn new(layers: &[usize], fit: usize, window_calls: u64) -> Hot {
        let window_calls = window_calls.max(1);
        Hot {
            counts: layers.iter().map(|experts| vec![0.0; *experts]).collect(),
            stays: layers.iter().map(|experts| vec![false; *experts]).collect(),
            limit: 0,
            limit_max: (fit as f64 * MEMORY_SHARE) as usize,
            calls: 0,
            window_calls,
            computed: Duration::ZERO,
            waited: Duration::ZERO,
        }
    }

    /// Whether an expert stays here.
    pub fn stays(&self, layer: usize, expert: u32) -> bool {
        self.stays
            .get(layer)
            .and_then(|layer| layer.get(expert as usize))
            .is_some_and(|stays| *stays)
    }

    /// Number of experts that stay.
    pub fn len(&self) -> usize {
        self.stays.iter().flatten().filter(|stays| **stays).count()
    }

    /// Notes what a call chose.
    pub fn chosen(&mut self, layer: usize, experts: impl Iterator<Item = u32>) {
        let Some(counts) = self.counts.get_mut(layer) else { return };
        for expert in experts {
            if let Some(count) = counts.get_mut(expert as usize) {
                *count += 1.0;
            }
        }
    }

    /// Notes how long this machine computed its share of a call, and then waited for workers.
    pub fn took(&mut self, computed: Duration, waited: Duration) {
        self.calls += 1;
        self.computed += computed;
        self.waited += waited;
        if self.calls.is_multiple_of(self.window_calls) {
            self.adjust();
        }
    }

    fn adjust(&mut self) {
        let (computed, waited) = (self.computed.as_secs_f64(), self.waited.as_secs_f64());
        let share = waited / (computed + waited).max(f64::MIN_POSITIVE);
        if share > WAIT_MOST {
            self.limit =
                (self.limit + (self.limit / 4).max(self.limit_max / 8 + 1)).min(self.limit_max);
        } else if share < WAIT_LEAST {
            self.limit = self.limit.saturating_sub((self.limit / 8).max(1));
        }
        (self.computed, self.waited) = (Duration::ZERO, Duration::ZERO);
        let mut order: Vec<(f32, usize, usize)> = Vec::new();
        for (layer, counts) in self.counts.iter().enumerate() {
            let chosen = counts.iter().enumerate().filter(|(_, count)| **count > 0.0);
            order.extend(chosen.map(|(expert, count)| (*count, layer, expert)));
        }
        // The most often chosen first; of equals those that stay already, which are in memory.
        order.sort_by(|a, b| {
            let stays = |at: &(f32, usize, usize)| self.stays[at.1][at.2];
            b.0.total_cmp(&a.0).then(stays(b).cmp(&stays(a))).then((a.1, a.2).cmp(&(b.1, b.2)))
        });
        self.stays.iter_mut().flatten().for_each(|stays| *stays = false);
        for (_, layer, expert) in order.into_iter().take(self.limit) {
            self.stays[layer][expert] = true;
        }
        self.counts.iter_mut().flatten().for_each(|count| *count *= 0.5);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Windows in which some experts are chosen, with so many microseconds each.
    fn windows(hot: &mut Hot, count: u64, computed_us: u64, waited_us: u64) {
        for call in 0..count * WINDOW_CALLS {
            let layer = (call % 2) as usize;
            // Expert 3 always, expert 5 often, the others now and then.
            let some = (call / 2 % 16) as u32;
            let often = if call % 4 < 3 { 5 } else { some };
            hot.chosen(layer, [3, often, some].into_iter());
            hot.took(Duration::from_micros(computed_us), Duration::from_micros(waited_us));
        }
    }

    #[test]
    fn experts_chosen_most_stay_while_workers_are_waited_for() {
        let mut hot = Hot::new(&[16, 16], 8, WINDOW_CALLS);
        windows(&mut hot, 1, 10, 90);
        assert!(hot.len() > 0);
        windows(&mut hot, 10, 10, 90);
        assert!(hot.stays(0, 3) && hot.stays(1, 3));
        // As many as three quarters of what fits.
        assert_eq!(hot.len(), 6);
        assert!(hot.stays(0, 5) && hot.stays(1, 5));
        // As many while neither is much.
        windows(&mut hot, 3, 90, 10);
        assert_eq!(hot.len(), 6);
    }

    #[test]
    fn fewer_stay_when_nobody_is_waited_for_and_none_without_memory() {
        let mut hot = Hot::new(&[16; 2], 40, WINDOW_CALLS);
        windows(&mut hot, 12, 10, 90);
        let most = hot.len();
        windows(&mut hot, 4, 99, 1);
        assert!(hot.len() < most);
        windows(&mut hot, 40, 99, 1);
        assert_eq!(hot.len(), 0);
        let mut none = Hot::new(&[16; 2], 1, WINDOW_CALLS);
        windows(&mut none, 5, 1, 99);
        assert_eq!(none.len(), 0);
    }
}
