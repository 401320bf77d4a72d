//! The seam between a step and a family.

use container::{Config, Family as FamilyId, Model};
use experts::{ExpertBackend, Ledger, Reader, Route};
use numerics::rope::RopeTable;
use numerics::{Buf, Compute};

use crate::error::ModelError;
use crate::glm;
use crate::kv::{KvShape, KvStore};
use crate::moe::Moe;
use crate::olmoe;
use crate::profile::Profile;
use crate::weights::{DenseLoad, Int8Classes};

/// One token of a step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Row {
    /// Token id.
    pub token: u32,
    /// Sequence, an index into the step's key/value store.
    pub sequence: usize,
    /// Position in its sequence. Rows of a sequence come in ascending, gapless order.
    pub position: usize,
}

/// What every block of a layer is given.
#[derive(Clone, Copy)]
pub(crate) struct Step<'a> {
    pub compute: &'a Compute,
    pub layer: usize,
    pub rope: &'a RopeTable,
    pub rows: &'a [Row],
    pub profile: &'a Profile,
    pub experts: &'a dyn ExpertBackend,
    pub routes: Option<&'a dyn RouteObserver>,
    /// The next layer, if it is sparse.
    pub next: Option<NextRouter<'a>>,
}

/// The router of the next layer, to guess which experts it will choose.
#[derive(Clone, Copy)]
pub(crate) struct NextRouter<'a> {
    pub layer: usize,
    /// The norm before it.
    pub norm: &'a [f32],
    pub eps: f32,
    pub moe: &'a Moe,
}

/// What a step works with.
#[derive(Clone, Copy)]
pub struct StepContext<'a> {
    /// Level, threads and working memory.
    pub compute: &'a Compute,
    /// The clock that is told what is done.
    pub profile: &'a Profile,
    /// Who computes routed experts.
    pub experts: &'a dyn ExpertBackend,
    /// Who is told what the routers chose.
    pub routes: Option<&'a dyn RouteObserver>,
}

/// Is told what the routers chose; never changes what is computed.
pub trait RouteObserver: Send + Sync {
    /// The choices of a layer, `top_k` per row of the step, best first.
    fn routed(&self, layer: usize, routes: &[Route], top_k: usize);
}

/// A loaded model: dense weights and the mathematics over them.
pub trait Family: Send + Sync {
    /// The configuration.
    fn config(&self) -> &Config;

    /// Widths of the key/value state.
    fn kv_shape(&self) -> &KvShape;

    /// Bytes of dense weights and tables in memory.
    fn dense_bytes(&self) -> u64;

    /// Final hidden states of the rows, `[rows, hidden]`, before the last norm. `observe` is told
    /// layers done and in all, and returns whether to go on.
    fn forward(
        &self,
        context: StepContext<'_>,
        rows: &[Row],
        kv: &mut dyn KvStore,
        observe: &mut dyn FnMut(usize, usize) -> bool,
    ) -> Result<Buf<f32>, ModelError>;

    /// Logits of hidden states, `[rows, vocab]`.
    fn logits(&self, compute: &Compute, hidden: &[f32]) -> Result<Buf<f32>, ModelError>;
}

/// Loads the dense weights of a model for contexts of up to `positions` tokens. `progress` is
/// told bytes done and bytes in all. `int8` says which classes may take int8 activations.
pub fn open_family(
    model: &Model,
    reader: &Reader,
    ledger: &std::sync::Arc<Ledger>,
    positions: usize,
    int8: Int8Classes,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Box<dyn Family>, ModelError> {
    let load = DenseLoad::new(model, reader, ledger, int8, progress);
    Ok(match model.config.family {
        FamilyId::GlmMoeDsa => Box::new(glm::load(load, positions)?),
        FamilyId::Olmoe => Box::new(olmoe::load(load, positions)?),
    })
}
