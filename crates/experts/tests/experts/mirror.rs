//! A mirror that fails within a read: the expert is the same, the user hears of it once.

use std::collections::HashMap;
use std::io::ErrorKind;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use experts::load::LoadMemory;
use experts::reader::{AtOnce, PageBuffer};
use experts::{ExpertStore, Mirror};

use crate::support::{Answer, model, reader, table};

#[test]
fn a_dying_mirror_is_left_within_the_read_and_tried_again_later() {
    let model = model();
    let table_of = || table(&model);
    let dead = Arc::new(AtomicBool::new(false));
    let seen = dead.clone();
    // After some bytes the drive is gone, in the middle of an expert.
    let dying = reader(&model, move |_, _, _, len| match seen.load(Ordering::SeqCst) {
        false => Answer::Real,
        true if len > 1000 => Answer::Short(1000),
        true => Answer::Error(ErrorKind::Other),
    });
    let experts: HashMap<_, _> = {
        let table = table_of();
        table.keys().map(|key| (key, table.expert(key).clone())).collect()
    };
    let keys: Vec<_> = experts.keys().copied().collect();
    let mirror = Mirror { dir: "second".into(), reader: dying, experts, weight: 1000.0 };
    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = notices.clone();
    let store = ExpertStore::new(table_of(), reader(&model, |_, _, _, _| Answer::Real))
        .with_mirrors(
            vec![mirror],
            Arc::new(move |text: &str| {
                heard.lock().unwrap().push(text.to_owned());
            }),
        );
    let plain = ExpertStore::new(table_of(), reader(&model, |_, _, _, _| Answer::Real));
    let load = |store: &ExpertStore, at: usize| {
        let key = keys[at % keys.len()];
        let mut slot = PageBuffer::zeroed(store.table().expert(key).slot_bytes() as usize);
        store.load(key, &mut LoadMemory::default(), &mut slot, &mut AtOnce).unwrap();
        slot.to_vec()
    };
    let next = AtomicUsize::new(0);
    let same = || {
        let at = next.fetch_add(1, Ordering::Relaxed);
        assert_eq!(load(&store, at), load(&plain, at));
    };
    (0..20).for_each(|_| same());
    let health = || store.mirrors().next().unwrap().1;
    assert!(health().loads.get() >= 18 && !health().is_sick());
    dead.store(true, Ordering::SeqCst);
    (0..100).for_each(|_| same());
    assert!(health().is_sick());
    assert_eq!(health().failures.get(), 1, "a sick drive is left alone");
    assert!(health().avoided.get() > 90);
    {
        let notices = notices.lock().unwrap();
        assert_eq!(notices.len(), 1, "{notices:?}");
        assert!(notices[0].contains("second") && notices[0].contains("elsewhere"), "{notices:?}");
    }
    dead.store(false, Ordering::SeqCst);
    (0..300).for_each(|_| same());
    assert!(!health().is_sick());
    let notices = notices.lock().unwrap();
    assert_eq!(notices.len(), 2, "{notices:?}");
    assert!(notices[1].contains("again"), "{notices:?}");
}

#[test]
fn a_drive_that_fails_stays_sick_while_it_is_read_for_lack_of_another() {
    let model = model();
    let table_of = || table(&model);
    let all: Vec<_> = table_of().keys().collect();
    // The mirror has one expert, the one that the model's own drive cannot read.
    let bad = all[7];
    let source = table_of().expert(bad).clone();
    let weights = model.expert_sources(bad.0 as usize, bad.1 as usize).unwrap()[0].weights;
    let own = reader(&model, move |_, file, offset, len| {
        let end = offset + len as u64;
        match file == weights.file && offset <= weights.offset && weights.offset < end {
            true => Answer::Error(ErrorKind::Other),
            false => Answer::Real,
        }
    });
    let mirror = Mirror {
        dir: "second".into(),
        reader: reader(&model, |_, _, _, _| Answer::Real),
        experts: HashMap::from([(bad, source)]),
        // So little that the choice is the model's own drive.
        weight: 1e-9,
    };
    let notices = Arc::new(Mutex::new(Vec::new()));
    let heard = notices.clone();
    let notice = Arc::new(move |text: &str| heard.lock().unwrap().push(text.to_owned()));
    let store = ExpertStore::new(table_of(), own).with_mirrors(vec![mirror], notice);
    let load = |key| {
        let mut slot = PageBuffer::zeroed(store.table().expert(key).slot_bytes() as usize);
        store.load(key, &mut LoadMemory::default(), &mut slot, &mut AtOnce).unwrap();
    };
    for _ in 0..5 {
        load(bad);
        all.iter().filter(|key| **key != bad).take(10).for_each(|key| load(*key));
    }
    let notices = notices.lock().unwrap();
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].contains("the model's own directory fails"), "{notices:?}");
}

#[test]
fn hot_experts_are_split_evenly_between_equal_drives() {
    // Twelve hot experts of 256 in each of 43 layers.
    for stride in [1, 7, 21] {
        let mut on_mirror = 0;
        for layer in 0..43u32 {
            for hot in 0..12u32 {
                let key = (layer, (layer * 5 + hot * stride) % 256);
                on_mirror += u32::from(experts::store::choose_among(key, &[1.0, 1.0]) == 1);
            }
        }
        let share = f64::from(on_mirror) / (43.0 * 12.0);
        assert!((0.45..0.55).contains(&share), "stride {stride}: {share}");
    }
    // A drive of three times the weight gets three times as much.
    let all = (0..43).flat_map(|layer| (0..256).map(move |expert| (layer, expert)));
    let heavy = all.filter(|key| experts::store::choose_among(*key, &[1.0, 3.0]) == 1).count();
    assert!((0.73..0.77).contains(&(heavy as f64 / (43.0 * 256.0))));
}
