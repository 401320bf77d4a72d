//! Which routed experts a machine holds.

use std::ops::Range;

use crate::config::{Config, LayerKind};

/// Routed experts that a machine holds: those of some numbers in some layers, whether or not the
/// layers are sparse or exist.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct HeldExperts {
    /// The layers.
    pub layers: Range<usize>,
    /// The experts of each.
    pub experts: Range<usize>,
}

impl HeldExperts {
    /// All of them.
    pub const ALL: HeldExperts = HeldExperts { layers: 0..usize::MAX, experts: 0..usize::MAX };

    /// Layers and experts that a configuration has among them, layer by layer.
    pub(crate) fn of<'a>(
        &self,
        config: &'a Config,
    ) -> impl Iterator<Item = (usize, Range<usize>)> + use<'a> {
        let layers = self.layers.start..self.layers.end.min(config.all_layers());
        let experts = self.experts.start..self.experts.end.min(config.moe.experts);
        let sparse = |layer: &usize| config.layer_kind(*layer) == Some(LayerKind::Sparse);
        layers.filter(sparse).map(move |layer| (layer, experts.clone()))
    }
}
