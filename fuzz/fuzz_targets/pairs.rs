//! `.coli_pairs`: any bytes give a table or an error; a table is written, read back and asked.

#![no_main]

use std::path::Path;

use experts::pairs::{DISTANCE_MAX, FOLLOWERS_MAX, Workspace};
use experts::{Pairs, RouteShape};
use libfuzzer_sys::fuzz_target;

const SHAPE: RouteShape = RouteShape { layers: 12, experts: 32 };
const TOP_K: usize = 4;

fuzz_target!(|data: &[u8]| {
    let path = Path::new("pairs");
    let pairs = match Pairs::parse(path, data, SHAPE) {
        Err(error) => return assert!(!error.to_string().is_empty()),
        Ok(pairs) => pairs,
    };
    assert_eq!(Pairs::parse(path, pairs.to_text().as_bytes(), SHAPE).unwrap(), pairs);
    let (mut workspace, mut out) = (Workspace::default(), Vec::new());
    for (layer, distance) in (0..SHAPE.layers).flat_map(|l| (0..4).map(move |d| (l, d))) {
        let known = (1..=DISTANCE_MAX).contains(&distance) && layer + distance < SHAPE.layers;
        for expert in 0..SHAPE.experts as u32 {
            let followers = pairs.followers(layer, distance, expert);
            assert!(followers.len() <= FOLLOWERS_MAX && (known || followers.is_empty()));
        }
        pairs.predict(layer, distance, &[0, 1, 1, 31, 99], TOP_K, &mut workspace, &mut out);
        assert!(out.len() <= TOP_K && out.iter().all(|expert| (*expert as usize) < SHAPE.experts));
    }
});
