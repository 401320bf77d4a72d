//! What a conversion will do: the target format of every tensor class, resolved and priced before
//! any weight is read.

use std::collections::{BTreeMap, BTreeSet};

use container::{Config, Layout, Model, QSource, Role, TensorClass, TensorSpec, tensor_specs};
use formats::{Format, MatrixDesc, rans};

use crate::error::LabError;
use crate::shard::Target;

/// Target formats by class; a class that is absent keeps its source's format.
#[derive(Clone, Debug, Default)]
pub struct Choice {
    by_class: BTreeMap<TensorClass, Format>,
    /// Classes chosen by name; a model without one of them is refused.
    named: BTreeSet<TensorClass>,
}

/// Classes that `--dense` stands for.
pub const DENSE_CLASSES: [TensorClass; 8] = [
    TensorClass::SharedExpert,
    TensorClass::Attention,
    TensorClass::KvB,
    TensorClass::DenseMlp,
    TensorClass::Embedding,
    TensorClass::Head,
    TensorClass::Indexer,
    TensorClass::Mtp,
];

impl Choice {
    /// Chooses a format for a class.
    pub fn set(&mut self, class: TensorClass, format: Format) {
        self.by_class.insert(class, format);
        self.named.insert(class);
    }

    /// Chooses a format for every dense class that has none yet.
    pub fn set_dense(&mut self, format: Format) {
        for class in DENSE_CLASSES {
            self.by_class.entry(class).or_insert(format);
        }
    }

    /// The choice as manifest parameters.
    pub fn parameters(&self) -> BTreeMap<String, String> {
        let named = |(class, format): (&TensorClass, &Format)| {
            (class.name().to_owned(), full_name(*format))
        };
        self.by_class.iter().map(named).collect()
    }

    /// The target of a tensor stored as `source`.
    fn target(&self, spec: &TensorSpec, source: &QSource) -> Result<Target, LabError> {
        let class = spec.role.class();
        let vector = spec.role.is_vector();
        let wanted = self.by_class.get(&class).copied().filter(|_| !vector);
        let format = wanted.unwrap_or(source.format);
        let refuse = |why: &str| {
            Err(LabError::Request(format!("{} cannot be stored as {format}: {why}", spec.name)))
        };
        if format.is_rotated() && matches!(class, TensorClass::Embedding | TensorClass::KvB) {
            return refuse("its rows are read one by one and must not be rotated");
        }
        if spec.role == Role::MtpEhProj && matches!(format, Format::Int4Row | Format::Int2Row) {
            return refuse("half of this projection would round to zero; use groups or int8-row");
        }
        if let Format::Int4Grouped(group) = format
            && usize::from(group) > source.cols
        {
            return refuse("the group is longer than the rows");
        }
        let (rows, cols) = (source.rows, source.cols);
        Ok(Target { name: spec.name.clone(), format, rows, cols, vector })
    }
}

/// Stamp name that also tells the two fp8 scale types apart.
pub fn full_name(format: Format) -> String {
    match format {
        Format::Fp8B128(formats::Fp8Scale::Ue8m0) => "fp8-e4m3-b128-ue8m0".to_owned(),
        other => other.to_string(),
    }
}

/// One tensor of a conversion.
#[derive(Clone, Debug)]
pub struct Item {
    /// Where it comes from.
    pub source: QSource,
    /// What it becomes.
    pub target: Target,
    /// Layer and number of the routed expert it belongs to.
    pub expert: Option<(usize, usize)>,
}

/// A line of the printed plan.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct ClassLine {
    /// Tensors of the class.
    pub tensors: usize,
    /// Numbers in them.
    pub elements: u64,
    /// Formats before, by name.
    pub from: BTreeMap<String, usize>,
    /// Formats after, by name.
    pub to: BTreeMap<String, usize>,
    /// Bytes before.
    pub from_bytes: u64,
    /// Bytes after.
    pub to_bytes: u64,
}

/// Everything a conversion will write.
pub struct Plan {
    /// Tensors in order.
    pub items: Vec<Item>,
    /// Sums per class.
    pub classes: BTreeMap<TensorClass, ClassLine>,
}

impl Plan {
    /// Resolves a choice against a model.
    pub fn new(model: &Model, choice: &Choice) -> Result<Plan, LabError> {
        let mut plan = Plan { items: Vec::new(), classes: BTreeMap::new() };
        for spec in tensor_specs(&model.config) {
            let source = match model.find(&spec)? {
                Some(source) => source,
                None if spec.optional => continue,
                None => model.source(&spec)?,
            };
            let target = choice.target(&spec, &source)?;
            let line = plan.classes.entry(spec.role.class()).or_default();
            line.tensors += 1;
            line.elements += (source.rows * source.cols) as u64;
            *line.from.entry(full_name(source.format)).or_default() += 1;
            *line.to.entry(full_name(target.format)).or_default() += 1;
            line.from_bytes += source.bytes();
            line.to_bytes += target.bytes();
            let expert = spec.layer.zip(spec.expert);
            plan.items.push(Item { source, target, expert });
        }
        if let Some(class) = choice.named.iter().find(|class| !plan.classes.contains_key(class)) {
            return Err(LabError::Request(format!(
                "--{}: this model has no tensors of that class",
                class.name()
            )));
        }
        Ok(plan)
    }

    /// Refuses coded records where no expert would have one.
    pub fn check_coded(&self) -> Result<(), LabError> {
        let codes = |item: &Item| {
            let Target { format, rows, cols, .. } = item.target;
            item.expert.is_some()
                && MatrixDesc::for_matmul(format, rows, cols, false)
                    .is_ok_and(|desc| rans::applies(&desc))
        };
        if self.items.iter().any(codes) {
            return Ok(());
        }
        Err(LabError::Request(format!(
            "--layout {}: only experts in int4 are coded, and this plan has none; \
             give --experts int4-g64 or --layout r16k4",
            Layout::R16k4Rans.name()
        )))
    }
}

/// Every tensor of a model that is made from nothing: `formats` gives the format per class, None
/// for tensors that are left out.
pub fn synthetic_targets(
    config: &Config,
    mut format_of: impl FnMut(&TensorSpec) -> Option<Format>,
) -> Vec<(TensorSpec, Target)> {
    let mut targets = Vec::new();
    for spec in tensor_specs(config) {
        let Some(format) = format_of(&spec) else { continue };
        let vector = spec.role.is_vector();
        let format = if vector { Format::F32 } else { format };
        let target =
            Target { name: spec.name.clone(), format, rows: spec.rows, cols: spec.cols, vector };
        targets.push((spec, target));
    }
    targets
}
