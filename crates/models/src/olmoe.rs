//! OLMoE: grouped-query attention with normalised queries and keys, softmax-routed experts.
//!
//! Source: `olmoe` of transformers.

use container::{Attention, Config, Role};
use experts::ExpertBackend;
use formats::{Input, QTensor};
use numerics::rope::RopeTable;
use numerics::{Compute, function};

use crate::block::{check_finite, embed, head_logits, rms_rows};
use crate::error::ModelError;
use crate::family::{Family, Row, Step};
use crate::gqa::{Gqa, GqaShape};
use crate::kv::{KvShape, KvStore};
use crate::moe::Moe;
use crate::weights::{DenseLoad, DenseMemory};

struct Layer {
    input_norm: Vec<f32>,
    attention: Gqa,
    post_norm: Vec<f32>,
    moe: Moe,
}

/// The family.
pub struct Olmoe {
    config: Config,
    kv_shape: KvShape,
    embedding: QTensor,
    layers: Vec<Layer>,
    final_norm: Vec<f32>,
    /// `None` where the embedding is the head.
    head: Option<QTensor>,
    rope: RopeTable,
    memory: DenseMemory,
}

impl Olmoe {
    /// Loads the dense weights.
    pub fn load(mut load: DenseLoad<'_>, positions: usize) -> Result<Olmoe, ModelError> {
        let config = load.config().clone();
        let (Some(shape), Attention::Gqa { qk_norm, .. }) =
            (GqaShape::new(&config), &config.attention)
        else {
            return Err(ModelError::Container(container::ContainerError::Config {
                source_name: "config.json".to_owned(),
                field: "attention".to_owned(),
                problem: "this family has grouped-query attention".to_owned(),
            }));
        };
        let rope = RopeTable::new(shape.rope_dim(), config.rope_theta, positions);
        load.reserve_table(rope.bytes())?;
        let embedding = if config.tie_embeddings {
            load.matrix_and_rows(Role::Embedding, None)?
        } else {
            load.rows(Role::Embedding, None)?
        };
        let layers = (0..config.layers)
            .map(|layer| {
                let at = Some(layer);
                Ok(Layer {
                    input_norm: load.vector(Role::InputNorm, at)?,
                    attention: Gqa::load(&mut load, shape, *qk_norm, layer)?,
                    post_norm: load.vector(Role::PostAttentionNorm, at)?,
                    moe: Moe::load(&mut load, &config, layer)?,
                })
            })
            .collect::<Result<_, ModelError>>()?;
        let final_norm = load.vector(Role::FinalNorm, None)?;
        let head = if config.tie_embeddings { None } else { Some(load.matrix(Role::Head, None)?) };
        let kv_shape = KvShape::new(&config, |_| false);
        let memory = load.finish();
        Ok(Olmoe { config, kv_shape, embedding, layers, final_norm, head, rope, memory })
    }
}

impl Family for Olmoe {
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
        compute: &Compute,
        rows: &[Row],
        kv: &mut dyn KvStore,
        experts: &dyn ExpertBackend,
    ) -> Result<Vec<f32>, ModelError> {
        let (hidden, eps) = (self.config.hidden_size, self.config.rms_norm_eps);
        let mut x = embed(&self.embedding, rows)?;
        for (at, layer) in self.layers.iter().enumerate() {
            let numeric = ModelError::at(at);
            let normed = rms_rows(compute, &x, &layer.input_norm, eps);
            let input = Input::new("attention input", normed, hidden);
            let step = Step { compute, layer: at, rope: &self.rope, rows };
            let attended = layer.attention.forward(&step, &input, kv).map_err(&numeric)?;
            function::add(compute.isa, &mut x, &attended);
            let normed = rms_rows(compute, &x, &layer.post_norm, eps);
            let input = Input::new("feed-forward input", normed, hidden);
            let out = layer.moe.forward(compute, at, &input, experts)?;
            function::add(compute.isa, &mut x, &out);
            check_finite(compute, "hidden state", &x, hidden).map_err(&numeric)?;
        }
        Ok(x)
    }

    fn logits(&self, compute: &Compute, hidden: &[f32]) -> Result<Vec<f32>, ModelError> {
        let head = self.head.as_ref().unwrap_or(&self.embedding);
        head_logits(compute, &self.config, &self.final_norm, head, hidden)
    }
}
