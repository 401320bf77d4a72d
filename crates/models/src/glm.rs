//! GLM with latent attention, sparse-attention indexer, and routed plus shared experts.
//!
//! Source: `glm_moe_dsa` of transformers. The multi-token-prediction layer is read and checked
//! when it is stored; nothing computes with it yet, so it is not kept.

use container::{Attention, Config, IndexerKind, LayerKind, Presence, Role};
use formats::Input;
use numerics::Isa;

use crate::block::{add_rows, rms_rows};
use crate::decoder::{Decoder, DecoderLayer};
use crate::dsa::{Indexer, Selections};
use crate::error::{ModelError, family_error};
use crate::family::{Family, Step};
use crate::kv::{KvShape, KvStore};
use crate::mla::{Mla, MlaShape};
use crate::mlp;
use crate::moe::Moe;
use crate::profile::Activity;
use crate::weights::{DenseLoad, Ffn};

enum FeedForward {
    Dense(Box<Ffn>),
    Sparse(Box<Moe>),
}

/// Where a layer's key selection comes from.
enum Select {
    /// Its own indexer.
    Own(Box<Indexer>),
    /// The last selection made.
    Inherit,
    /// There is no indexer: all keys, up to this many.
    AllUpTo(usize),
}

struct Layer {
    input_norm: Vec<f32>,
    attention: Mla,
    select: Select,
    post_norm: Vec<f32>,
    feed_forward: FeedForward,
}

/// Loads the dense weights.
pub(crate) fn load(
    mut load: DenseLoad<'_>,
    positions: usize,
) -> Result<impl Family + use<>, ModelError> {
    let config = load.config();
    let shape = MlaShape::new(config).ok_or_else(|| family_error("latent attention"))?;
    let has_indexer = load.model().report().indexer == Presence::Present;
    if load.model().report().mtp == Presence::Present {
        for layer in config.layers..config.all_layers() {
            check_mtp(&mut load, config, shape, layer)?;
        }
    }
    let kv_shape = KvShape::of(load.model());
    Decoder::load(load, positions, shape.rope_dim(), kv_shape, |load, layer| {
        Layer::load(load, config, shape, has_indexer, layer)
    })
}

impl Layer {
    fn load(
        load: &mut DenseLoad<'_>,
        config: &Config,
        shape: MlaShape,
        has_indexer: bool,
        layer: usize,
    ) -> Result<Layer, ModelError> {
        let at = Some(layer);
        let Attention::Mla { indexer, .. } = &config.attention else {
            return Err(family_error("latent attention"));
        };
        let select = match (indexer, config.indexer_kind(layer)) {
            (Some(indexer), Some(IndexerKind::Full)) if has_indexer => {
                Select::Own(Box::new(Indexer::load(load, indexer, layer)?))
            }
            (Some(_), Some(IndexerKind::Shared)) if has_indexer => Select::Inherit,
            (Some(indexer), _) => Select::AllUpTo(indexer.topk),
            (None, _) => Select::AllUpTo(usize::MAX),
        };
        let feed_forward = match config.layer_kind(layer) {
            Some(LayerKind::Dense) => {
                let roles = [Role::DenseGate, Role::DenseUp, Role::DenseDown];
                FeedForward::Dense(Box::new(load.ffn(roles, at)?))
            }
            _ => FeedForward::Sparse(Box::new(Moe::load(load, config, layer)?)),
        };
        Ok(Layer {
            input_norm: load.vector(Role::InputNorm, at)?,
            attention: Mla::load(load, shape, layer)?,
            select,
            post_norm: load.vector(Role::PostAttentionNorm, at)?,
            feed_forward,
        })
    }
}

impl DecoderLayer for Layer {
    /// The last key selection made.
    type Carry = Selections;

    fn forward(
        &self,
        step: &Step<'_>,
        config: &Config,
        x: &mut [f32],
        selections: &mut Selections,
        kv: &mut dyn KvStore,
    ) -> Result<(), ModelError> {
        let Step { compute, layer, rows, profile, .. } = *step;
        profile.enter(Activity::Attention);
        let numeric = ModelError::at(layer);
        let hidden = config.hidden_size;
        let normed = rms_rows(compute, x, &self.input_norm, config.rms_norm_eps);
        let input = Input::new("attention input", normed, hidden);
        let latent = self.attention.project(step, &input, kv).map_err(&numeric)?;
        let width = latent.len() / rows.len();
        let latent = Input::new("query latent", latent, width);
        match &self.select {
            Select::Own(indexer) => {
                *selections = indexer.select(step, &input, &latent, kv).map_err(&numeric)?;
            }
            Select::Inherit => {}
            Select::AllUpTo(topk) => {
                *selections = rows.iter().map(|_| None).collect();
                if let Some(row) = rows.iter().find(|row| row.position >= *topk) {
                    let position = row.position;
                    return Err(ModelError::NoIndexer { layer, position, topk: *topk });
                }
            }
        }
        let attended = self.attention.attend(step, &latent, selections, kv).map_err(&numeric)?;
        add_rows(compute, x, &attended, hidden);
        profile.enter(Activity::Other);
        let normed = rms_rows(compute, x, &self.post_norm, config.rms_norm_eps);
        let input = Input::new("feed-forward input", normed, hidden);
        let out = match &self.feed_forward {
            FeedForward::Dense(ffn) => mlp::forward(compute, ffn, &input).map_err(&numeric)?,
            FeedForward::Sparse(moe) => moe.forward(step, &input, x)?,
        };
        add_rows(compute, x, &out, hidden);
        Ok(())
    }

    fn router(&self) -> Option<(&[f32], &Moe)> {
        match &self.feed_forward {
            FeedForward::Dense(_) => None,
            FeedForward::Sparse(moe) => Some((&self.post_norm, moe)),
        }
    }
}

/// Reads the tensors of an MTP layer, checks them and lets them go.
fn check_mtp(
    load: &mut DenseLoad<'_>,
    config: &Config,
    shape: MlaShape,
    layer: usize,
) -> Result<(), ModelError> {
    let mark = load.mark();
    let at = Some(layer);
    for role in [Role::MtpEnorm, Role::MtpHnorm, Role::MtpSharedHeadNorm] {
        load.vector(role, at)?;
    }
    let has_indexer = load.model().has_indexer(layer);
    Layer::load(load, config, shape, has_indexer, layer)?;
    let joined = load.matrix(Role::MtpEhProj, at)?;
    let (mut row, half) = (vec![0.0; 2 * config.hidden_size], config.hidden_size);
    let mut seen = [false; 2];
    for output in 0..joined.desc().rows() {
        joined.view().decode_row(Isa::detect(), output, &mut row);
        seen[0] |= row[..half].iter().any(|value| *value != 0.0);
        seen[1] |= row[half..].iter().any(|value| *value != 0.0);
    }
    if let Some(zero) = seen.iter().position(|seen| !seen) {
        let spec = container::tensors::spec(config, Role::MtpEhProj, at, None);
        return Err(ModelError::ZeroHalf {
            tensor: spec.map_or_else(String::new, |spec| spec.name),
            half: ["first", "second"][zero],
        });
    }
    load.release_after(mark);
    Ok(())
}
