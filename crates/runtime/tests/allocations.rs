//! What a decoded token allocates, counted by the process's allocator: a test program of its own.

#[path = "runtime/support.rs"]
#[allow(dead_code)]
mod support;

use numerics::Activations;
use runtime::{Want, Work};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Blocks that a step of one token may allocate: lists of its rows, sequences and hidden states,
/// and now and then a node of the expert cache's order of use. None of them belongs to a layer.
const PER_TOKEN_MAX: u64 = 8;

#[test]
fn a_decoded_token_allocates_nothing_for_its_layers() {
    let _profiler = dhat::Profiler::builder().testing().build();
    for fixture in support::fixtures() {
        for activations in [Activations::Int8, Activations::F32] {
            let engine = support::open(&support::options(&fixture, activations));
            let ids = support::reference(&fixture).full_ids;
            let mut session = engine.session().unwrap();
            let (warm_up, counted) = ids.split_at(ids.len() / 2);
            let mut token = |token: u32| {
                let work = Work { session: &mut session, tokens: &[token], want: Want::Last };
                let hidden = engine.step(&mut [work]).unwrap().remove(0);
                std::hint::black_box(engine.logits(&hidden).unwrap());
            };
            warm_up.iter().for_each(|id| token(*id));
            let before = dhat::HeapStats::get().total_blocks;
            counted.iter().for_each(|id| token(*id));
            let blocks = dhat::HeapStats::get().total_blocks - before;
            let most = PER_TOKEN_MAX * counted.len() as u64;
            let name = fixture.display();
            assert!(blocks <= most, "{name} {activations}: {blocks} blocks, at most {most}");
            println!("{name} {activations}: {blocks} blocks for {} tokens", counted.len());
        }
    }
}
