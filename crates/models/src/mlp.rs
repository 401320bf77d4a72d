//! A dense feed-forward layer.

use formats::{Input, expert_ffn};
use numerics::{Buf, Compute, NumericError};

use crate::weights::Ffn;

/// The network's output for every row, `[rows, hidden]`.
pub fn forward(compute: &Compute, ffn: &Ffn, x: &Input<'_>) -> Result<Buf<f32>, NumericError> {
    let mut out = compute.scratch.filled_later(x.rows() * ffn.desc().down.rows());
    expert_ffn(compute, ffn.view(), x, None, &mut out)?;
    Ok(out)
}
