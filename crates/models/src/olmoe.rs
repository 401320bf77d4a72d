//! OLMoE: grouped-query attention with normalised queries and keys, softmax-routed experts.
//!
//! Source: `olmoe` of transformers.

use container::{Attention, Config, Role};
use formats::Input;

use crate::block::{add_rows, rms_rows};
use crate::decoder::{Decoder, DecoderLayer};
use crate::error::{ModelError, family_error};
use crate::family::{Family, Step};
use crate::gqa::{Gqa, GqaShape};
use crate::kv::{KvShape, KvStore};
use crate::moe::Moe;
use crate::profile::Activity;
use crate::weights::DenseLoad;

struct Layer {
    input_norm: Vec<f32>,
    attention: Gqa,
    post_norm: Vec<f32>,
    moe: Moe,
}

/// Loads the dense weights.
pub(crate) fn load(
    load: DenseLoad<'_>,
    positions: usize,
) -> Result<impl Family + use<>, ModelError> {
    let config = load.config();
    let (Some(shape), Attention::Gqa { qk_norm, .. }) = (GqaShape::new(config), &config.attention)
    else {
        return Err(family_error("grouped-query attention"));
    };
    let kv_shape = KvShape::of(load.model());
    Decoder::load(load, positions, shape.rope_dim(), kv_shape, |load, layer| {
        let at = Some(layer);
        Ok(Layer {
            input_norm: load.vector(Role::InputNorm, at)?,
            attention: Gqa::load(load, shape, *qk_norm, layer)?,
            post_norm: load.vector(Role::PostAttentionNorm, at)?,
            moe: Moe::load(load, config, layer)?,
        })
    })
}

impl DecoderLayer for Layer {
    type Carry = ();

    fn forward(
        &self,
        step: &Step<'_>,
        config: &Config,
        x: &mut [f32],
        _carry: &mut (),
        kv: &mut dyn KvStore,
    ) -> Result<(), ModelError> {
        let Step { compute, layer, profile, .. } = *step;
        profile.enter(Activity::Attention);
        let (hidden, eps) = (config.hidden_size, config.rms_norm_eps);
        let normed = rms_rows(compute, x, &self.input_norm, eps);
        let input = Input::new("attention input", normed, hidden);
        let attended = self.attention.forward(step, &input, kv).map_err(ModelError::at(layer))?;
        add_rows(compute, x, &attended, hidden);
        profile.enter(Activity::Other);
        let normed = rms_rows(compute, x, &self.post_norm, eps);
        let input = Input::new("feed-forward input", normed, hidden);
        let out = self.moe.forward(step, &input, x)?;
        add_rows(compute, x, &out, hidden);
        Ok(())
    }

    fn router(&self) -> Option<(&[f32], &Moe)> {
        Some((&self.post_norm, &self.moe))
    }
}
