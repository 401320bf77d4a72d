//! Reading every byte of a model, as `doctor --deep` does.

use container::{Model, QSource, tensor_specs};
use experts::Reader;
use experts::load::{for_each_block, load_f32};
use formats::{MatrixDesc, QTensor};

use crate::error::LabError;

/// Reads every tensor through the loaders that the engine uses and checks its values. Returns the
/// number of tensors; `progress` is told bytes done and in all.
pub fn check_tensors(
    model: &Model,
    reader: &Reader,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<usize, LabError> {
    let total = model.report().bytes();
    let (mut done, mut count) = (0, 0);
    for spec in tensor_specs(&model.config) {
        let source = match model.find(&spec)? {
            Some(source) => source,
            None if spec.optional => continue,
            None => model.source(&spec)?,
        };
        if spec.role.is_vector() {
            load_f32(reader, &source)?;
        } else {
            check_matrix(reader, &source)?;
        }
        count += 1;
        done += source.bytes();
        progress(done, total);
    }
    Ok(count)
}

fn check_matrix(reader: &Reader, source: &QSource) -> Result<(), LabError> {
    let shape = |error| LabError::Encode { tensor: source.name.clone(), source: error };
    let desc = MatrixDesc::for_rows(source.format, source.rows, source.cols).map_err(shape)?;
    for_each_block(reader, source, desc, desc.row_granule(), |rows, weights, scales| {
        let block = MatrixDesc::for_rows(source.format, rows.len(), source.cols)?;
        QTensor::zeroed(block).store(0..rows.len(), weights, scales)
    })?;
    Ok(())
}
