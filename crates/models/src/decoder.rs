//! What every family shares: embedding, a stack of layers, final norm, head, rotary table.

use container::{Config, Role};
use formats::{Input, QTensor};
use numerics::rope::RopeTable;
use numerics::{Buf, Compute};

use crate::block::{check_finite, embed, linear, rms_rows};
use crate::error::ModelError;
use crate::family::{Family, NextRouter, Row, Step, StepContext};
use crate::kv::{KvShape, KvStore};
use crate::moe::Moe;
use crate::weights::{DenseLoad, DenseMemory};

/// One layer of a family.
pub(crate) trait DecoderLayer: Send + Sync {
    /// What a layer hands to the next ones besides the residual stream.
    type Carry: Default;

    /// Adds the layer's outputs to the residual stream `x`, `[rows, hidden]`.
    fn forward(
        &self,
        step: &Step<'_>,
        config: &Config,
        x: &mut [f32],
        carry: &mut Self::Carry,
        kv: &mut dyn KvStore,
    ) -> Result<(), ModelError>;

    /// The norm before the router, and the router; `None` for a dense layer.
    fn router(&self) -> Option<(&[f32], &Moe)>;
}

/// A stack of layers between embedding and head.
pub(crate) struct Decoder<L> {
    config: Config,
    kv_shape: KvShape,
    embedding: QTensor,
    layers: Vec<L>,
    final_norm: Vec<f32>,
    /// `None` where the embedding is the head.
    head: Option<QTensor>,
    rope: RopeTable,
    memory: DenseMemory,
}

impl<L> Decoder<L> {
    /// Loads a decoder whose layers come from `layer`.
    pub fn load(
        mut load: DenseLoad<'_>,
        positions: usize,
        rope_dim: usize,
        kv_shape: KvShape,
        mut layer: impl FnMut(&mut DenseLoad<'_>, usize) -> Result<L, ModelError>,
    ) -> Result<Decoder<L>, ModelError> {
        let config = load.config().clone();
        load.reserve_table(RopeTable::bytes_of(rope_dim, positions))?;
        let rope = RopeTable::new(rope_dim, config.rope_theta, positions);
        let embedding = load.matrix(Role::Embedding, None)?;
        let head = if config.tie_embeddings { None } else { Some(load.matrix(Role::Head, None)?) };
        let layers = (0..config.layers).map(|at| layer(&mut load, at)).collect::<Result<_, _>>()?;
        let final_norm = load.vector(Role::FinalNorm, None)?;
        let memory = load.finish();
        Ok(Decoder { config, kv_shape, embedding, layers, final_norm, head, rope, memory })
    }
}

impl<L: DecoderLayer> Family for Decoder<L> {
    fn config(&self) -> &Config {
        &self.config
    }

    fn kv_shape(&self) -> &KvShape {
        &self.kv_shape
    }

    fn dense_bytes(&self) -> u64 {
        self.memory.bytes()
    }

    fn forward(
        &self,
        context: StepContext<'_>,
        rows: &[Row],
        kv: &mut dyn KvStore,
        observe: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<Buf<f32>, ModelError> {
        let StepContext { compute, profile, experts, routes } = context;
        let hidden = self.config.hidden_size;
        let mut x = embed(compute, &self.embedding, rows)?;
        let mut carry = L::Carry::default();
        for (at, layer) in self.layers.iter().enumerate() {
            let router = self.layers.get(at + 1).and_then(DecoderLayer::router);
            let eps = self.config.rms_norm_eps;
            let next = router.map(|(norm, moe)| NextRouter { layer: at + 1, norm, eps, moe });
            let rope = &self.rope;
            let step = Step { compute, layer: at, rope, rows, profile, experts, routes, next };
            layer.forward(&step, &self.config, &mut x, &mut carry, kv)?;
            check_finite(compute, "hidden state", &x, hidden).map_err(ModelError::at(at))?;
            if !observe(at + 1, self.layers.len()) {
                return Err(ModelError::Cancelled { layer: at });
            }
        }
        Ok(x)
    }

    fn logits(&self, compute: &Compute, hidden: &[f32]) -> Result<Buf<f32>, ModelError> {
        let config = &self.config;
        let numeric = ModelError::at(config.layers);
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        let normed = rms_rows(compute, hidden, &self.final_norm, config.rms_norm_eps);
        let input = Input::new("head input", normed, config.hidden_size);
        let logits = linear(compute, head, &input).map_err(&numeric)?;
        check_finite(compute, "logits", &logits, config.vocab_size).map_err(&numeric)?;
        Ok(logits)
    }
}
