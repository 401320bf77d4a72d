use std::io::ErrorKind;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use container::FileId;
use experts::cache::{CacheOptions, ExpertCache};
use experts::load::load_expert;
use experts::{LoadError, ReadError};

use crate::support::{Answer, model, reader, table};

/// Bytes of expert 0 of the first sparse layer, read through a script.
fn load_through(
    script: impl FnMut(u64, FileId, u64, usize) -> Answer + Send + 'static,
) -> Result<Vec<u8>, LoadError> {
    let model = model();
    let table = table(&model);
    let source = table.iter().next().unwrap();
    let mut slot = vec![0; source.desc.bytes()];
    load_expert(&reader(&model, script), "expert", source, &mut Vec::new(), &mut slot)?;
    Ok(slot)
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

#[test]
fn a_failed_load_leaves_nothing_behind_and_the_next_request_reads_again() {
    let model = model();
    let table = table(&model);
    let layer = (0..table.layers()).find(|layer| !table.layer(*layer).is_empty()).unwrap();
    let bytes = table.slot_bytes_max();
    let broken = Arc::new(AtomicBool::new(true));
    let seen = broken.clone();
    let reader = reader(&model, move |_, _, _, _| {
        if seen.load(Ordering::SeqCst) { Answer::Error(ErrorKind::Other) } else { Answer::Real }
    });
    let options = CacheOptions { capacity_bytes: 2 * bytes, per_layer_max: None, loaders: 2 };
    let cache = ExpertCache::new(table, reader, options).unwrap();
    for _ in 0..100 {
        let (ready, mut pending) = cache.request(layer, &[0, 1, 2]);
        assert!(ready.is_empty());
        for _ in 0..3 {
            let (_, result) = pending.next().unwrap();
            assert!(result.is_err());
        }
        assert!(pending.next().is_none());
        assert_eq!(cache.bytes(), 0, "a failed load keeps its slot");
    }
    broken.store(false, Ordering::SeqCst);
    let (_, mut pending) = cache.request(layer, &[0]);
    assert!(pending.next().unwrap().1.is_ok());
    let (ready, _) = cache.request(layer, &[0]);
    assert_eq!(ready.len(), 1);
}

#[test]
fn two_requests_for_one_missing_expert_share_a_read() {
    let model = model();
    let table = table(&model);
    let layer = (0..table.layers()).find(|layer| !table.layer(*layer).is_empty()).unwrap();
    let options =
        CacheOptions { capacity_bytes: table.total_bytes(), per_layer_max: None, loaders: 1 };
    let cache =
        ExpertCache::new(table, reader(&model, |_, _, _, _| Answer::Real), options).unwrap();
    let (_, mut first) = cache.request(layer, &[3]);
    let (ready, mut second) = cache.request(layer, &[3]);
    assert!(first.next().unwrap().1.is_ok());
    if ready.is_empty() {
        assert!(second.next().unwrap().1.is_ok());
    }
    assert_eq!(cache.counters().loads.load(Ordering::Relaxed), 1);
}

#[test]
fn a_loader_that_panics_fails_its_request_and_the_next_one_is_served() {
    let model = model();
    let table = table(&model);
    let layer = (0..table.layers()).find(|layer| !table.layer(*layer).is_empty()).unwrap();
    let options =
        CacheOptions { capacity_bytes: table.slot_bytes_max(), per_layer_max: None, loaders: 1 };
    let reader = reader(&model, |call, _, _, _| {
        assert!(call > 0, "a bug in the first read");
        Answer::Real
    });
    let cache = ExpertCache::new(table, reader, options).unwrap();
    let (_, mut pending) = cache.request(layer, &[0]);
    let (_, result) = pending.next().unwrap();
    assert!(matches!(&*result.err().unwrap(), LoadError::Panicked { .. }));
    assert_eq!(cache.bytes(), 0);
    let (_, mut pending) = cache.request(layer, &[0]);
    assert!(pending.next().unwrap().1.is_ok());
}

#[test]
fn loads_that_nobody_waits_for_any_more_are_not_begun() {
    let model = model();
    let table = table(&model);
    let layer = (0..table.layers()).find(|layer| !table.layer(*layer).is_empty()).unwrap();
    // One slot: while its lease is held no further load can begin.
    let options =
        CacheOptions { capacity_bytes: table.slot_bytes_max(), per_layer_max: None, loaders: 2 };
    let cache =
        ExpertCache::new(table, reader(&model, |_, _, _, _| Answer::Real), options).unwrap();
    let (_, mut first) = cache.request(layer, &[0]);
    let lease = first.next().unwrap().1.unwrap();
    let (_, abandoned) = cache.request(layer, &[1, 2, 3, 4, 5]);
    drop(abandoned);
    drop(lease);
    let (_, mut last) = cache.request(layer, &[6]);
    assert!(last.next().unwrap().1.is_ok());
    // The loader may have taken one of the abandoned experts off the queue before.
    assert!(cache.counters().loads.load(Ordering::Relaxed) <= 4);
}
