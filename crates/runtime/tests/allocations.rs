//! What a decoded token allocates, counted by the process's allocator: a test program of its own.

#[path = "runtime/support.rs"]
#[allow(dead_code)]
mod support;

use numerics::Activations;
use runtime::{Want, Work};

#[global_allocator]
static ALLOCATOR: dhat::Alloc = dhat::Alloc;

/// Blocks that a step of one token allocates: lists of its rows and sequences, its hidden states
/// and the list of them. None of them belongs to a layer.
const PER_TOKEN: u64 = 4;
/// Blocks that may come on top in a whole run: lists that grow with the context, and working
/// memory that both threads happen to hold at once for the first time, which a busy machine makes
/// likelier. One block more for each token would be beyond it.
const GROWTH_MAX: u64 = 30;
/// Experts of a layer whose order of use is one node of a tree; with more, nodes come and go.
const ONE_NODE: usize = 11;

#[test]
fn a_decoded_token_allocates_nothing_for_its_layers() {
    let _profiler = dhat::Profiler::builder().testing().build();
    for fixture in support::fixtures() {
        for activations in [Activations::Int8, Activations::F32] {
            let mut options = support::options(&fixture, activations);
            options.fill = true;
            let engine = support::open(&options);
            // What is counted are tokens, not loads: which thread makes one differs.
            engine.experts().cache().unwrap().wait_until_warm();
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
            let nodes = if engine.config().moe.experts > ONE_NODE { PER_TOKEN } else { 0 };
            let most = (PER_TOKEN + nodes) * counted.len() as u64 + GROWTH_MAX;
            let name = fixture.display();
            assert!(blocks <= most, "{name} {activations}: {blocks} blocks, at most {most}");
            println!("{name} {activations}: {blocks} blocks for {} tokens", counted.len());
        }
    }
}
