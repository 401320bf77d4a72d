use std::collections::HashMap;
use std::io::ErrorKind;

use container::Model;
use experts::cache::counters::{Phase, Tier};
use experts::cache::{CacheOptions, ExpertCache, Key, Lease};
use experts::load::{LoadMemory, load_expert};
use experts::reader::{AtOnce, PageBuffer};
use experts::{Usage, UsageShape, pins};

use crate::support::{Answer, cache, guessing, layers, model, reader, small_model, table};

struct Noise(u64);

impl Noise {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

fn bytes_of(lease: &Lease) -> Vec<u8> {
    let view = lease.view();
    [view.gate.data, view.up.data, view.down.data].concat()
}

/// What every expert's bytes are.
fn truth(model: &Model) -> HashMap<Key, Vec<u8>> {
    let (table, reader) = (table(model), reader(model, |_, _, _, _| Answer::Real));
    let load = |key| {
        let source = table.expert(key);
        let mut slot = PageBuffer::zeroed(source.slot_bytes() as usize);
        let memory = &mut LoadMemory::default();
        load_expert(&reader, key, source, memory, &mut slot, &mut AtOnce).unwrap();
        let view = source.desc.view(&slot);
        (key, [view.gate.data, view.up.data, view.down.data].concat())
    };
    table.keys().map(load).collect()
}

/// What a run of random use may do besides asking for experts.
#[derive(Clone, Copy)]
struct Use {
    operations: usize,
    slots: u64,
    guesses: bool,
    failures: bool,
    per_layer_max: Option<usize>,
    loaders: usize,
}

/// Random use by three threads against the true bytes: whatever is handed out stays what it is
/// while it is held, the capacity is never exceeded, every choice is counted once, and nothing
/// leaks.
fn random_use(used: Use) {
    let model = small_model();
    let truth = truth(&model);
    let table = table(&model);
    let layers = layers(&model);
    let experts = table.places(layers[0]) as u64;
    let options = CacheOptions {
        per_layer_max: used.per_layer_max,
        ..guessing(&model, used.slots, if used.guesses { 2 } else { 0 }, used.loaders)
    };
    let cache = cache(&model, options, move |call, _, _, _| match call % 64 {
        7 if used.failures => Answer::Error(ErrorKind::Other),
        11 => Answer::Error(ErrorKind::Interrupted),
        23 => Answer::Error(ErrorKind::WouldBlock),
        40..60 => Answer::Short(333),
        _ => Answer::Real,
    });
    let selections = std::sync::atomic::AtomicU64::new(0);
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (cache, layers, truth, selections) = (&cache, &layers, &truth, &selections);
            scope.spawn(move || {
                let mut noise = Noise(thread * 7 + 1);
                let mut done = 0;
                while done < used.operations / 3 {
                    let layer = layers[noise.below(layers.len() as u64) as usize];
                    let mut wanted: Vec<_> = (0..1 + noise.below(4))
                        .map(|_| (noise.below(experts) as u32, 1 + noise.below(3) as usize))
                        .collect();
                    wanted.sort_unstable();
                    wanted.dedup_by_key(|(expert, _)| *expert);
                    done += 1 + wanted.len();
                    match noise.below(16) {
                        0 => {
                            let guessed: Vec<u32> = wanted.iter().map(|(e, _)| *e).collect();
                            cache.guess(layer, &guessed);
                            continue;
                        }
                        1 => {
                            let key = (layer as u32, wanted[0].0);
                            cache.pin(key, noise.below(2) == 0);
                            continue;
                        }
                        _ => {}
                    }
                    let rows = 1 + noise.below(2) as usize;
                    let (ready, mut pending) = cache.request(layer, &wanted, rows);
                    selections.fetch_add(wanted.len() as u64, std::sync::atomic::Ordering::Relaxed);
                    assert!(cache.bytes() <= options.capacity_bytes);
                    let right = |(expert, lease): &(u32, Lease)| {
                        assert_eq!(bytes_of(lease), truth[&(layer as u32, *expert)]);
                    };
                    let mut seen = ready.len();
                    ready.iter().for_each(right);
                    drop(ready);
                    // Now and then a request is given up before its reads come.
                    if noise.below(8) == 0 {
                        continue;
                    }
                    while let Some(arrived) = pending.next(1 + noise.below(3) as usize) {
                        match arrived {
                            Ok(leases) => {
                                leases.iter().for_each(right);
                                assert!(cache.bytes() <= options.capacity_bytes);
                                leases.iter().for_each(right);
                                seen += leases.len();
                            }
                            Err((expert, error)) => {
                                assert!(used.failures, "{expert}: {error}");
                                seen += 1;
                            }
                        }
                    }
                    assert_eq!(seen, wanted.len());
                }
            });
        }
    });
    let counters = cache.counters();
    let mut counted = 0;
    for phase in [Phase::Decode, Phase::Prefill] {
        for tier in [Tier::Pinned, Tier::Cached, Tier::Guessed, Tier::Late, Tier::Missing] {
            counted += counters.selections(phase, tier);
        }
    }
    assert_eq!(counted, selections.into_inner());
    assert!(counters.evictions.get() > 100, "nothing was ever evicted");
    every_slot_can_be_had(&cache, &layers, experts as u32);
}

/// Asks for everything, one after another, until each has been had.
fn every_slot_can_be_had(cache: &ExpertCache, layers: &[usize], experts: u32) {
    for &layer in layers {
        for expert in 0..experts {
            loop {
                let (ready, mut pending) = cache.request(layer, &[(expert, 1)], 1);
                if ready.len() == 1 || matches!(pending.next(1), Some(Ok(_))) {
                    break;
                }
            }
        }
    }
}

const USE: Use = Use {
    operations: 100_000,
    slots: 5,
    guesses: false,
    failures: false,
    per_layer_max: None,
    loaders: 4,
};

#[test]
fn a_cache_of_one_slot_serves_three_threads() {
    random_use(Use { slots: 1, loaders: 1, ..USE });
}

#[test]
fn a_small_cache_serves_three_threads_a_million_times() {
    random_use(Use { operations: 1_000_000, slots: 9, guesses: true, ..USE });
}

#[test]
fn one_expert_per_layer_serves_three_threads() {
    random_use(Use { per_layer_max: Some(1), slots: 64, loaders: 2, ..USE });
}

#[test]
fn a_drive_that_fails_now_and_then_costs_no_slot() {
    random_use(Use { failures: true, guesses: true, ..USE });
}

#[test]
fn what_is_chosen_most_stays() {
    let model = model();
    let layer = layers(&model)[0];
    let slot = table(&model).slot_bytes_max();
    let cache = cache(&model, CacheOptions::new(4 * slot, 2), |_, _, _, _| Answer::Real);
    let ask = |expert: u32| {
        let (ready, mut pending) = cache.request(layer, &[(expert, 1)], 1);
        while pending.next(1).is_some() {}
        ready.len() == 1
    };
    for _ in 0..4 {
        assert_eq!([0, 1, 2].map(ask).len(), 3);
    }
    // A scan over all others uses one slot only.
    for expert in 3..24 {
        assert!(!ask(expert));
    }
    assert_eq!([0, 1, 2].map(ask), [true; 3]);
}

#[test]
fn pinned_experts_stay_whatever_is_asked_for() {
    let model = model();
    let layer = layers(&model)[0];
    let slot = table(&model).slot_bytes_max();
    let cache = cache(&model, CacheOptions::new(3 * slot, 2), |_, _, _, _| Answer::Real);
    let key = (layer as u32, 7);
    assert!(cache.pin(key, true));
    assert!(!cache.pin((layer as u32, 8), true), "half of three slots holds one");
    cache.warm([key]);
    cache.wait_until_warm();
    for expert in (0..7).chain(8..24).cycle().take(200) {
        let (_, mut pending) = cache.request(layer, &[(expert, 9)], 9);
        while pending.next(1).is_some() {}
    }
    assert_eq!(cache.request(layer, &[(7, 1)], 1).0.len(), 1);
    assert_eq!(cache.counters().tier(Tier::Pinned), 1);
    cache.pin(key, false);
    for expert in (0..7).cycle().take(30) {
        let (_, mut pending) = cache.request(layer, &[(expert, 9)], 9);
        while pending.next(1).is_some() {}
    }
    assert!(cache.request(layer, &[(7, 1)], 1).0.is_empty());
}

#[test]
fn warming_fills_what_is_free_in_the_order_given_and_evicts_nothing() {
    let model = model();
    let layer = layers(&model)[0] as u32;
    let slot = table(&model).slot_bytes_max();
    let cache = cache(&model, CacheOptions::new(3 * slot, 1), |_, _, _, _| Answer::Real);
    cache.warm([9, 4, 17, 2, 1].map(|expert| (layer, expert)));
    cache.wait_until_warm();
    let mut residents: Vec<u32> = cache.residents().iter().map(|(key, _, _)| key.1).collect();
    residents.sort_unstable();
    assert_eq!(residents, [4, 9, 17]);
    assert_eq!(cache.counters().evictions.get(), 0);
    assert_eq!(cache.bytes(), 3 * slot);
}

#[test]
fn guesses_use_room_of_their_own_and_never_evict_what_was_asked_for() {
    let model = model();
    let all = layers(&model);
    let (layer, next) = (all[0], all[1]);
    let cache = cache(&model, guessing(&model, 6, 2, 2), |_, _, _, _| Answer::Real);
    let ask = |layer: usize, experts: &[u32]| {
        let wanted: Vec<_> = experts.iter().map(|expert| (*expert, 1)).collect();
        let (ready, mut pending) = cache.request(layer, &wanted, 1);
        while pending.next(1).is_some() {}
        ready.len()
    };
    ask(layer, &[0, 1, 2, 3]);
    for round in 0..50 {
        cache.guess(next, &[round % 20, round % 20 + 1, 22]);
        assert_eq!(ask(layer, &[0, 1, 2, 3]), 4, "a guess took room of what is used");
        ask(next, &[23]);
        ask(layer, &[0, 1, 2, 3]);
    }
    let counters = cache.counters();
    assert_eq!(counters.guessed.get(), 150);
    assert!(counters.issued.get() > 0);
    assert_eq!(
        counters.guessed.get(),
        counters.issued.get()
            + counters.dropped_resident.get()
            + counters.dropped_busy.get()
            + counters.dropped_unlikely.get()
    );
}

#[test]
fn a_guess_that_comes_true_is_neither_a_hit_nor_a_miss() {
    let model = model();
    let layer = layers(&model)[0];
    let cache = cache(&model, guessing(&model, 6, 2, 2), |_, _, _, _| Answer::Real);
    cache.guess(layer, &[5]);
    // The guess is read in its own time; asking does not wait for it to begin.
    while cache.counters().loads.get() == 0 {
        std::thread::yield_now();
    }
    while cache.request(layer, &[(5, 1)], 1).0.is_empty() {
        std::thread::yield_now();
    }
    let counters = cache.counters();
    let (guessed, late) = (counters.tier(Tier::Guessed), counters.tier(Tier::Late));
    assert_eq!(guessed + late, 1, "asked for once it was there, or while it was read");
    assert_eq!((counters.loads.get(), counters.wasted.get()), (1, 0));
}

#[test]
fn guesses_that_never_come_true_are_soon_tried_rarely() {
    let model = model();
    let all = layers(&model);
    let (layer, next) = (all[0], all[1]);
    let cache = cache(&model, guessing(&model, 4, 1, 1), |_, _, _, _| Answer::Real);
    for round in 0..2000 {
        cache.guess(next, &[round % 20]);
        // All but the one that lies there have come to an end.
        let counters = cache.counters();
        while counters.issued.get() > counters.wasted.get() + counters.dropped_no_room.get() + 1 {
            std::thread::yield_now();
        }
        let (_, mut pending) = cache.request(next, &[(23, 1)], 1);
        while pending.next(1).is_some() {}
        let (_, mut pending) = cache.request(layer, &[(round % 2, 1)], 1);
        while pending.next(1).is_some() {}
        if cache.counters().dropped_unlikely.get() > 100 {
            return;
        }
    }
    panic!("{:?}", cache.counters());
}

#[test]
fn without_room_for_guesses_none_is_read() {
    let model = model();
    let layer = layers(&model)[0];
    let slot = table(&model).slot_bytes_max();
    let cache = cache(&model, CacheOptions::new(6 * slot, 2), |_, _, _, _| Answer::Real);
    cache.guess(layer, &[1, 2, 3]);
    let (_, mut pending) = cache.request(layer, &[(9, 1)], 1);
    assert!(matches!(pending.next(1), Some(Ok(_))));
    assert_eq!((cache.counters().guessed.get(), cache.counters().loads.get()), (0, 1));
}

#[test]
fn a_pinned_expert_that_comes_as_a_guess_stays() {
    let model = model();
    let layer = layers(&model)[0];
    let cache = cache(&model, guessing(&model, 8, 2, 1), |_, _, _, _| Answer::Real);
    assert!(cache.pin((layer as u32, 5), true));
    assert_eq!(cache.absent_pins(), [(layer as u32, 5)]);
    cache.guess(layer, &[5]);
    let ask = |expert: u32| {
        let (ready, mut pending) = cache.request(layer, &[(expert, 9)], 9);
        while pending.next(1).is_some() {}
        ready.len()
    };
    ask(5);
    for expert in (0..5).chain(6..24).cycle().take(100) {
        ask(expert);
    }
    assert_eq!(ask(5), 1);
    assert_eq!(cache.counters().tier(Tier::Pinned), 1);
    assert_eq!(cache.absent_pins(), []);
}

#[test]
fn pins_that_a_turn_has_not_brought_into_memory_are_given_to_others() {
    let model = model();
    let layer = layers(&model)[0];
    let slot = table(&model).slot_bytes_max();
    let cache = cache(&model, CacheOptions::new(6 * slot, 1), |_, _, _, _| Answer::Real);
    let ask = |expert: u32| {
        let (_, mut pending) = cache.request(layer, &[(expert, 1)], 1);
        while pending.next(1).is_some() {}
    };
    // The cache is full of others before the history's are warmed.
    (0..6).for_each(ask);
    let shape = UsageShape {
        layers: model.config.layers,
        experts: model.config.moe.experts,
        family: "glm_moe_dsa",
    };
    let mut usage = Usage::empty(shape);
    (20..23).for_each(|expert| usage.add(layer, expert, 1000));
    assert_eq!(pins::prepare(&cache, &usage, 4), 3);
    cache.wait_until_warm();
    assert_eq!(cache.absent_pins().len(), 3);
    assert_eq!(pins::exchange(&cache), 3);
    assert_eq!(cache.absent_pins(), []);
    let pinned: Vec<u32> = {
        let residents = cache.residents().into_iter().filter(|(_, _, pinned)| *pinned);
        residents.map(|(key, _, _)| key.1).collect()
    };
    assert_eq!(pinned.len(), 3);
    assert!(pinned.iter().all(|expert| *expert < 6), "{pinned:?}");
    // What is worth more by far takes the place of what is pinned.
    let chosen = (0..6).find(|expert| !pinned.contains(expert)).unwrap();
    (0..200).for_each(|_| ask(chosen));
    assert!(pins::exchange(&cache) >= 1);
    let is_pinned = |(key, _, pinned): &(Key, i64, bool)| key.1 == chosen && *pinned;
    assert!(cache.residents().iter().any(is_pinned));
}
