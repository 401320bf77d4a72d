//! Loading the dense weights of a model by role, each reserved in the ledger before it is read.

use std::sync::Arc;

use container::{Config, Model, QSource, Role, TensorClass, tensors};
use experts::load::{load_f32, load_matrix};
use experts::{ByteClass, Ledger, Reader, Reservation};
use formats::{ExpertDesc, ExpertRef, MatrixDesc, QTensor};

use crate::error::ModelError;

/// Tensor classes whose quantised matrices take int8 activations under `--activations int8`; the
/// others always multiply in f32. The default is part of the numerics contract, settled by
/// measurement, see `docs/numerics.md`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Int8Classes(u16);

impl Int8Classes {
    /// Classes that may take int8 activations. Those left out are decoded row by row or decide
    /// where tokens go.
    pub const POSSIBLE: [TensorClass; 7] = [
        TensorClass::Experts,
        TensorClass::SharedExpert,
        TensorClass::Attention,
        TensorClass::DenseMlp,
        TensorClass::Head,
        TensorClass::Indexer,
        TensorClass::Mtp,
    ];

    /// These classes and no others.
    pub fn of(classes: &[TensorClass]) -> Int8Classes {
        Int8Classes(classes.iter().fold(0, |bits, class| bits | 1 << *class as u16))
    }

    /// Whether a class takes int8 activations.
    pub fn contains(self, class: TensorClass) -> bool {
        self.0 >> class as u16 & 1 == 1
    }

    /// The classes, in order.
    pub fn iter(self) -> impl Iterator<Item = TensorClass> {
        Self::POSSIBLE.into_iter().filter(move |class| self.contains(*class))
    }
}

impl Default for Int8Classes {
    fn default() -> Self {
        // The indexer decides which keys a token sees, and no trained model here shows what int8
        // activations would cost it.
        let default = Self::POSSIBLE.into_iter().filter(|class| *class != TensorClass::Indexer);
        Int8Classes(default.fold(0, |bits, class| bits | 1 << class as u16))
    }
}

/// The loading of a model's dense weights.
pub struct DenseLoad<'a> {
    model: &'a Model,
    reader: &'a Reader,
    ledger: &'a Arc<Ledger>,
    int8: Int8Classes,
    progress: &'a mut dyn FnMut(u64, u64),
    done: u64,
    total: u64,
    memory: Vec<Reservation>,
}

impl<'a> DenseLoad<'a> {
    /// A loading of `model` through `reader`, accounted in `ledger`.
    pub fn new(
        model: &'a Model,
        reader: &'a Reader,
        ledger: &'a Arc<Ledger>,
        int8: Int8Classes,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> DenseLoad<'a> {
        let report = model.report();
        let total = report.bytes() - report.class_bytes(TensorClass::Experts);
        DenseLoad { model, reader, ledger, int8, progress, done: 0, total, memory: Vec::new() }
    }

    /// The configuration.
    pub fn config(&self) -> &'a Config {
        &self.model.config
    }

    /// The container.
    pub fn model(&self) -> &'a Model {
        self.model
    }

    fn source(&self, role: Role, layer: Option<usize>) -> Result<QSource, ModelError> {
        let spec = tensors::spec(&self.model.config, role, layer, None).ok_or_else(|| {
            // A family asks only for roles of its own table.
            container::ContainerError::Config {
                source_name: "config.json".to_owned(),
                field: format!("{role:?}"),
                problem: format!("this model has no such tensor in layer {layer:?}"),
            }
        })?;
        Ok(self.model.source(&spec)?)
    }

    fn reserve(&mut self, bytes: u64) -> Result<(), ModelError> {
        self.memory.push(self.ledger.reserve(ByteClass::Dense, bytes)?);
        Ok(())
    }

    fn count(&mut self, source: &QSource) {
        self.done += source.bytes();
        (self.progress)(self.done, self.total.max(self.done));
    }

    /// Accounts for memory that is not a tensor, such as rotary tables.
    pub fn reserve_table(&mut self, bytes: usize) -> Result<(), ModelError> {
        self.reserve(bytes as u64)
    }

    /// A matrix, arranged for what its role is used for.
    pub fn matrix(&mut self, role: Role, layer: Option<usize>) -> Result<QTensor, ModelError> {
        let source = self.source(role, layer)?;
        let desc = desc_of(&self.model.config, role, &source, self.int8)?;
        self.reserve(desc.bytes() as u64)?;
        let tensor = load_matrix(self.reader, &source, desc)?;
        self.count(&source);
        Ok(tensor)
    }

    /// A vector as f32.
    pub fn vector(&mut self, role: Role, layer: Option<usize>) -> Result<Vec<f32>, ModelError> {
        let source = self.source(role, layer)?;
        self.reserve((source.rows * source.cols * size_of::<f32>()) as u64)?;
        let values = load_f32(self.reader, &source)?;
        self.count(&source);
        Ok(values)
    }

    /// Gate, up and down of a feed-forward network that stays in memory.
    pub fn ffn(&mut self, roles: [Role; 3], layer: Option<usize>) -> Result<Ffn, ModelError> {
        let [gate, up, down] = roles;
        Ok(Ffn {
            gate: self.matrix(gate, layer)?,
            up: self.matrix(up, layer)?,
            down: self.matrix(down, layer)?,
        })
    }

    /// Ends the loading; the reservations live as long as the weights.
    pub fn finish(self) -> DenseMemory {
        DenseMemory { memory: self.memory }
    }

    /// Forgets the reservations made since `mark`, for tensors that were only checked.
    pub fn release_after(&mut self, mark: usize) {
        self.memory.truncate(mark);
    }

    /// A mark for [`DenseLoad::release_after`].
    pub fn mark(&self) -> usize {
        self.memory.len()
    }
}

/// How a matrix is kept: by rows where single rows of it are decoded, else for multiplication.
fn desc_of(
    config: &Config,
    role: Role,
    source: &QSource,
    int8: Int8Classes,
) -> Result<MatrixDesc, ModelError> {
    let decoded = matches!(role, Role::Embedding | Role::KvB);
    if decoded && source.format.is_rotated() {
        return Err(ModelError::RotatedRows {
            tensor: source.name.clone(),
            format: source.format,
            remedy: "store this tensor in another format, such as int8-row",
        });
    }
    // A tied embedding is multiplied with too; its few looked-up rows are unpacked from tiles.
    let multiplied = !decoded || (role == Role::Embedding && config.tie_embeddings);
    let (format, rows, cols) = (source.format, source.rows, source.cols);
    let desc = if multiplied {
        MatrixDesc::for_matmul(format, rows, cols, int8.contains(role.class()))
    } else {
        MatrixDesc::for_rows(format, rows, cols)
    };
    desc.map_err(|error| ModelError::Shape { tensor: source.name.clone(), source: error })
}

/// Bytes that the dense weights of a model take in memory, rotary tables not counted.
pub fn planned_dense_bytes(model: &Model, int8: Int8Classes) -> Result<u64, ModelError> {
    let config = &model.config;
    let layers = (0..config.layers).flat_map(|layer| tensors::layer_specs(config, layer));
    let mut bytes = 0u64;
    for spec in tensors::model_specs(config).into_iter().chain(layers) {
        let Some(source) = model.find(&spec)? else { continue };
        bytes += if spec.role.is_vector() {
            (source.rows * source.cols * size_of::<f32>()) as u64
        } else {
            desc_of(config, spec.role, &source, int8)?.bytes() as u64
        };
    }
    Ok(bytes)
}

/// The account of a model's dense weights.
pub struct DenseMemory {
    memory: Vec<Reservation>,
}

impl DenseMemory {
    /// Bytes reserved.
    pub fn bytes(&self) -> u64 {
        self.memory.iter().map(Reservation::bytes).sum()
    }
}

/// A feed-forward network in memory: a dense layer's or the shared experts'.
pub struct Ffn {
    gate: QTensor,
    up: QTensor,
    down: QTensor,
}

impl Ffn {
    /// The matrices for the one expert FFN.
    pub fn view(&self) -> ExpertRef<'_> {
        ExpertRef { gate: self.gate.view(), up: self.up.view(), down: self.down.view() }
    }

    /// Formats and shapes.
    pub fn desc(&self) -> ExpertDesc {
        ExpertDesc { gate: *self.gate.desc(), up: *self.up.desc(), down: *self.down.desc() }
    }
}
