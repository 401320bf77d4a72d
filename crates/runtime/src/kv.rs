//! The key/value state of sessions, page by page as positions are written.

use models::{KvKind, KvShape, KvStore};
use numerics::attention::KEY_BLOCK;

/// State of one sequence: per layer and kind, pages of [`KEY_BLOCK`] positions.
#[derive(Debug, Default)]
pub struct SequenceKv {
    layers: Vec<[Vec<Box<[f32]>>; 3]>,
    widths: Vec<[usize; 3]>,
}

impl SequenceKv {
    /// Empty state of a shape.
    pub fn new(shape: &KvShape) -> SequenceKv {
        SequenceKv {
            layers: shape.layers.iter().map(|_| Default::default()).collect(),
            widths: shape.layers.clone(),
        }
    }

    fn write(&mut self, layer: usize, kind: KvKind, position: usize, values: &[f32]) {
        let width = self.widths[layer][kind as usize];
        assert_eq!(values.len(), width, "a key or value of another width than the state's");
        let pages = &mut self.layers[layer][kind as usize];
        let page = position / KEY_BLOCK;
        while pages.len() <= page {
            pages.push(vec![0.0; KEY_BLOCK * width].into_boxed_slice());
        }
        pages[page][position % KEY_BLOCK * width..][..width].copy_from_slice(values);
    }
}

/// The state of the sequences of one step.
pub struct BatchKv<'a> {
    /// One per work item.
    pub sequences: Vec<&'a mut SequenceKv>,
}

impl KvStore for BatchKv<'_> {
    fn write(
        &mut self,
        sequence: usize,
        layer: usize,
        kind: KvKind,
        position: usize,
        values: &[f32],
    ) {
        self.sequences[sequence].write(layer, kind, position, values);
    }

    fn page(&self, sequence: usize, layer: usize, kind: KvKind, page: usize) -> &[f32] {
        &self.sequences[sequence].layers[layer][kind as usize][page]
    }
}
