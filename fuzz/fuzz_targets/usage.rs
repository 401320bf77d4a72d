//! `.coli_usage`: any bytes give a history or an error; what is written is read back.

#![no_main]

use std::path::Path;

use experts::usage::{LAYER_SELECTIONS_MAX, Origin, PROBLEMS_MAX};
use experts::{Usage, UsageShape};
use libfuzzer_sys::fuzz_target;

const SHAPE: UsageShape = UsageShape { layers: 3, experts: 8, family: "olmoe" };

fuzz_target!(|data: &[u8]| {
    let path = Path::new("history");
    let named = Usage::parse(path, data, SHAPE, Origin::Named);
    match Usage::parse(path, data, SHAPE, Origin::Found) {
        Err(error) => assert!(!error.to_string().is_empty()),
        Ok((mut usage, problems)) => {
            assert_eq!(named.unwrap().0, usage);
            assert_eq!(problems.listed.len(), problems.total.min(PROBLEMS_MAX));
            let text = usage.to_text();
            assert_eq!(text.is_empty(), usage.is_empty());
            let (again, problems) =
                Usage::parse(path, text.as_bytes(), SHAPE, Origin::Found).unwrap();
            assert_eq!((&again, problems.total), (&usage, 0));
            let mut one = Usage::empty(SHAPE);
            (0..=SHAPE.layers).for_each(|layer| one.add(layer, 0, 1));
            usage.absorb(&one);
            for layer in 0..=SHAPE.layers {
                assert!((1..=LAYER_SELECTIONS_MAX).contains(&usage.layer_total(layer)));
            }
        }
    }
});
