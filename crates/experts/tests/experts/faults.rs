use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use container::FileId;
use experts::cache::{CacheOptions, Wanted};
use experts::load::{LoadMemory, load_expert};
use experts::reader::{AtOnce, PageBuffer};
use experts::{LoadError, ReadError};

use crate::support::{Answer, cache, guessing, layers, model, reader, table};

/// Bytes of expert 0 of the first sparse layer, read through a script.
fn load_through(
    script: impl FnMut(u64, FileId, u64, usize) -> Answer + Send + 'static,
) -> Result<Vec<u8>, LoadError> {
    let model = model();
    let table = table(&model);
    let key = table.keys().next().unwrap();
    let source = table.expert(key);
    let mut slot = PageBuffer::zeroed(source.slot_bytes() as usize);
    let (reader, memory) = (reader(&model, script), &mut LoadMemory::default());
    load_expert(&reader, key, source, memory, &mut slot, &mut AtOnce)?;
    Ok(slot[..source.desc.bytes()].to_vec())
}

#[test]
fn short_interrupted_and_briefly_failing_reads_give_the_bytes_of_whole_ones() {
    let want = load_through(|_, _, _, _| Answer::Real).unwrap();
    assert!(want.iter().any(|byte| *byte != 0));
    assert_eq!(load_through(|_, _, _, _| Answer::Short(1)).unwrap(), want);
    let interrupted = |call: u64, _: FileId, _: u64, _: usize| match call % 2 {
        0 => Answer::Error(ErrorKind::Interrupted),
        _ => Answer::Short(100),
    };
    assert_eq!(load_through(interrupted).unwrap(), want);
    let twice = |call: u64, _: FileId, _: u64, _: usize| match call % 3 {
        2 => Answer::Real,
        _ => Answer::Error(ErrorKind::WouldBlock),
    };
    assert_eq!(load_through(twice).unwrap(), want);
}

#[test]
fn a_read_that_keeps_failing_names_file_offset_and_bytes() {
    let mut got_half = false;
    let error = load_through(move |_, _, _, _| {
        if std::mem::replace(&mut got_half, true) {
            Answer::Error(ErrorKind::Other)
        } else {
            Answer::Short(10)
        }
    })
    .unwrap_err();
    let LoadError::Read { source: ReadError::Io { path, offset, got, wanted, .. }, .. } = &error
    else {
        panic!("{error}")
    };
    assert!(path.ends_with("model.safetensors") && *offset > 0 && *got == 10 && *wanted > 10);
    assert!(error.to_string().contains("model.safetensors"), "{error}");
}

#[test]
fn a_transient_failure_that_never_ends_is_given_up() {
    let error = load_through(|_, _, _, _| Answer::Error(ErrorKind::WouldBlock)).unwrap_err();
    assert!(matches!(error, LoadError::Read { source: ReadError::Io { .. }, .. }), "{error}");
}

#[test]
fn a_file_that_ends_too_early_says_where() {
    let error = load_through(|call, _, _, _| match call {
        0 => Answer::Short(7),
        _ => Answer::End,
    })
    .unwrap_err();
    let LoadError::Read { source: ReadError::End { offset, end, .. }, .. } = &error else {
        panic!("{error}")
    };
    assert_eq!(*end, offset + 7);
}

/// Experts of a layer, each chosen by one row.
fn wanted(experts: &[u32]) -> Vec<Wanted> {
    experts.iter().map(|expert| (*expert, 1)).collect()
}

#[test]
fn a_failed_load_leaves_nothing_behind_and_the_next_request_reads_again() {
    let model = model();
    let layer = layers(&model)[0];
    let options = CacheOptions::new(2 * table(&model).slot_bytes_max(), 2);
    let broken = Arc::new(AtomicBool::new(true));
    let seen = broken.clone();
    let cache = cache(&model, options, move |_, _, _, _| {
        if seen.load(Ordering::SeqCst) { Answer::Error(ErrorKind::Other) } else { Answer::Real }
    });
    for _ in 0..100 {
        let (ready, mut pending) = cache.request(layer, &wanted(&[0, 1, 2]), 1);
        assert!(ready.is_empty());
        for _ in 0..3 {
            assert!(pending.next(4).unwrap().is_err());
        }
        assert!(pending.next(4).is_none());
    }
    broken.store(false, Ordering::SeqCst);
    let (_, mut pending) = cache.request(layer, &wanted(&[0]), 1);
    assert!(pending.next(1).unwrap().is_ok());
    let (ready, _) = cache.request(layer, &wanted(&[0]), 1);
    assert_eq!(ready.len(), 1);
    assert_eq!(cache.bytes(), table(&model).slot_bytes_max(), "a failed load keeps its slot");
}

#[test]
fn ten_thousand_guesses_of_which_every_tenth_fails_cost_no_slot() {
    let model = model();
    let layer = layers(&model)[0];
    let cache = cache(&model, guessing(&model, 3, 1, 1), |call, _, _, _| match call % 10 {
        3 => Answer::Error(ErrorKind::Other),
        _ => Answer::Real,
    });
    for round in 0..10_000 {
        cache.guess(layer, &[round % 20]);
        // Its layer is computed: the guess is stale.
        let (_, mut pending) = cache.request(layer, &wanted(&[20 + round % 3]), 1);
        while pending.next(1).is_some() {}
    }
    // Chosen by more rows than any other, so that they stay.
    for expert in [0, 1] {
        while cache.request(layer, &[(expert, 50_000)], 1).0.is_empty() {
            let (_, mut pending) = cache.request(layer, &wanted(&[expert]), 1);
            while pending.next(1).is_some() {}
        }
    }
    let both = cache.request(layer, &wanted(&[0, 1]), 1).0.len();
    assert_eq!(both, 2, "two of three slots are not for guesses");
}

#[test]
fn two_requests_for_one_missing_expert_share_a_read() {
    let model = model();
    let layer = layers(&model)[0];
    let options = CacheOptions::new(table(&model).total_bytes(), 1);
    let cache = cache(&model, options, |_, _, _, _| Answer::Real);
    let (_, mut first) = cache.request(layer, &wanted(&[3]), 1);
    let (ready, mut second) = cache.request(layer, &wanted(&[3]), 1);
    assert!(first.next(1).unwrap().is_ok());
    if ready.is_empty() {
        assert!(second.next(1).unwrap().is_ok());
    }
    assert_eq!(cache.counters().loads.get(), 1);
}

#[test]
fn a_loader_that_panics_fails_its_request_and_the_next_one_is_served() {
    let model = model();
    let layer = layers(&model)[0];
    let options = CacheOptions::new(table(&model).slot_bytes_max(), 1);
    let cache = cache(&model, options, |call, _, _, _| {
        assert!(call > 0, "a bug in the first read");
        Answer::Real
    });
    let (_, mut pending) = cache.request(layer, &wanted(&[0]), 1);
    let (_, error) = pending.next(1).unwrap().err().unwrap();
    assert!(matches!(&*error, LoadError::Panicked { .. }));
    let (_, mut pending) = cache.request(layer, &wanted(&[0]), 1);
    assert!(pending.next(1).unwrap().is_ok());
}

#[test]
fn loads_that_nobody_waits_for_any_more_are_not_begun() {
    let model = model();
    let layer = layers(&model)[0];
    // One slot: while its lease is held no further load can begin.
    let options = CacheOptions::new(table(&model).slot_bytes_max(), 2);
    let cache = cache(&model, options, |_, _, _, _| Answer::Real);
    let (_, mut first) = cache.request(layer, &wanted(&[0]), 1);
    let lease = first.next(1).unwrap().ok().unwrap();
    let (_, abandoned) = cache.request(layer, &wanted(&[1, 2, 3, 4, 5]), 1);
    drop(abandoned);
    drop(lease);
    let (_, mut last) = cache.request(layer, &wanted(&[6]), 1);
    assert!(last.next(1).unwrap().is_ok());
    // The loaders may have taken two of the abandoned experts off the queue before.
    assert!(cache.counters().loads.get() <= 4);
}
