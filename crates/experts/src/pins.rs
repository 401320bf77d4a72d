//! What a history of choices does to a cache: whom it expects, whom it keeps, and whom it exchanges
//! when the present differs from the past.

use crate::cache::policy::{HALF_LIFE_ROWS, TWICE};
use crate::cache::{ExpertCache, Key};
use crate::usage::Usage;

/// Pins exchanged after a turn, at most: each is a few operations, the loads are done already.
pub const SWAPS_PER_TURN: usize = 16;
/// How much more an expert must be worth than a pinned one to take its place.
const HYSTERESIS: i64 = TWICE;

/// Gives experts the scores that their history makes likely, pins the best of them, and reads as
/// many as fit in the background, the best first. Returns the number pinned.
pub fn prepare(cache: &ExpertCache, usage: &Usage, top_k: usize) -> usize {
    let mut experts: Vec<(Key, f64)> = Vec::new();
    for layer in 0..cache.store().table().layers() {
        let rows = usage.layer_total(layer) as f64 / top_k.max(1) as f64;
        if rows == 0.0 {
            continue;
        }
        // What so many rows would have earned in the long run; fewer rows earned less.
        let long_run = HALF_LIFE_ROWS / std::f64::consts::LN_2;
        let scale = (long_run / rows).min(1.0);
        for (expert, count) in usage.layer(layer).iter().enumerate() {
            let key = (layer as u32, expert as u32);
            if *count > 0 && cache.store().table().get(key).is_some() {
                experts.push((key, *count as f64 * scale));
            }
        }
    }
    cache.seed(experts.iter().copied());
    experts.sort_by(|a, b| b.1.total_cmp(&a.1).then(a.0.cmp(&b.0)));
    let pinned = experts.iter().take_while(|(key, _)| cache.pin(*key, true)).count();
    cache.warm(experts.into_iter().map(|(key, _)| key));
    pinned
}

/// Lets pinned experts that are no longer worth it go, and those that a whole turn has not brought
/// into memory; pins others that are in memory in their place, [`SWAPS_PER_TURN`] at most. Returns
/// the number exchanged. Called between steps.
pub fn exchange(cache: &ExpertCache) -> usize {
    let (mut pinned, mut free): (Vec<_>, Vec<_>) =
        cache.residents().into_iter().partition(|(_, _, pinned)| *pinned);
    pinned.sort_by_key(|(key, worth, _)| (*worth, *key));
    free.sort_by_key(|(key, worth, _)| (-*worth, *key));
    let (mut exchanged, mut free) = (0, free.iter());
    for out in cache.absent_pins().into_iter().take(SWAPS_PER_TURN) {
        cache.pin(out, false);
        if free.next().is_some_and(|(into, _, _)| cache.pin(*into, true)) {
            exchanged += 1;
        }
    }
    let left = SWAPS_PER_TURN.saturating_sub(exchanged);
    for ((out, least, _), (into, most, _)) in pinned.iter().zip(free).take(left) {
        if *most < least + HYSTERESIS {
            break;
        }
        cache.pin(*out, false);
        if !cache.pin(*into, true) {
            // Larger than the one before it; the old one stays.
            cache.pin(*out, true);
            break;
        }
        exchanged += 1;
    }
    exchanged
}
