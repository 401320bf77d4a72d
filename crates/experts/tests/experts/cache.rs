use std::collections::HashMap;
use std::sync::atomic::Ordering;

use experts::cache::{CacheOptions, ExpertCache, Lease};
use experts::load::load_expert;

use crate::support::{Answer, model, reader, table};

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

/// Random requests against the true bytes: whatever is handed out stays what it is while it is
/// held, the capacity is never exceeded, and nothing leaks.
fn random_use(per_layer_max: Option<usize>, slots: u64, loaders: usize) {
    let model = model();
    let layers: Vec<usize> = {
        let table = table(&model);
        (0..table.layers()).filter(|layer| !table.layer(*layer).is_empty()).collect()
    };
    let truth: HashMap<(usize, u32), Vec<u8>> = {
        let (table, reader) = (table(&model), reader(&model, |_, _, _, _| Answer::Real));
        let mut truth = HashMap::new();
        for &layer in &layers {
            for (expert, source) in table.layer(layer).iter().enumerate() {
                let mut slot = vec![0; source.desc.bytes()];
                load_expert(&reader, "expert", source, &mut Vec::new(), &mut slot).unwrap();
                let view = source.desc.view(&slot);
                let bytes = [view.gate.data, view.up.data, view.down.data].concat();
                truth.insert((layer, expert as u32), bytes);
            }
        }
        truth
    };
    let table = table(&model);
    let experts = table.layer(layers[0]).len() as u64;
    let capacity_bytes = slots * table.slot_bytes_max();
    let options = CacheOptions { capacity_bytes, per_layer_max, loaders };
    let disk = reader(&model, |call, _, _, _| match call % 5 {
        0 => Answer::Short(33),
        _ => Answer::Real,
    });
    let cache = ExpertCache::new(table, disk, options).unwrap();
    std::thread::scope(|scope| {
        for thread in 0..3u64 {
            let (cache, layers, truth) = (&cache, &layers, &truth);
            scope.spawn(move || {
                let mut noise = Noise(thread * 7 + 1);
                for _ in 0..400 {
                    let layer = layers[noise.below(layers.len() as u64) as usize];
                    let mut wanted: Vec<u32> =
                        (0..1 + noise.below(4)).map(|_| noise.below(experts) as u32).collect();
                    wanted.sort_unstable();
                    wanted.dedup();
                    let (ready, mut pending) = cache.request(layer, &wanted);
                    assert!(cache.bytes() <= capacity_bytes);
                    let mut seen = 0;
                    for (expert, lease) in ready {
                        assert_eq!(bytes_of(&lease), truth[&(layer, expert)]);
                        seen += 1;
                    }
                    // Now and then a request is given up before its reads come.
                    if noise.below(8) == 0 {
                        continue;
                    }
                    while let Some((expert, lease)) = pending.next() {
                        let lease = lease.unwrap();
                        assert_eq!(bytes_of(&lease), truth[&(layer, expert)]);
                        assert!(cache.bytes() <= capacity_bytes);
                        assert_eq!(bytes_of(&lease), truth[&(layer, expert)]);
                        seen += 1;
                    }
                    assert_eq!(seen, wanted.len());
                }
            });
        }
    });
    let counters = cache.counters();
    assert!(counters.evictions.load(Ordering::Relaxed) > 100, "nothing was ever evicted");
    // Every slot can still be had: a full layer's worth of requests, one after another.
    for &layer in &layers {
        for expert in 0..experts as u32 {
            let (ready, mut pending) = cache.request(layer, &[expert]);
            assert!(ready.len() == 1 || pending.next().unwrap().1.is_ok());
        }
    }
}

#[test]
fn a_cache_of_one_slot_serves_three_threads() {
    random_use(None, 1, 1);
}

#[test]
fn a_small_cache_serves_three_threads() {
    random_use(None, 5, 4);
}

#[test]
fn one_expert_per_layer_serves_three_threads() {
    random_use(Some(1), 64, 2);
}
