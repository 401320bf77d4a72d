//! `coli info`: what a model is and what it needs.

use container::{
    Attention, ChatTemplate, Config, Family, LayerKind, Model, Presence, TensorClass, Tokenizer,
};
use models::{Int8Classes, KvShape};
use numerics::NUMERICS_VERSION;
use serde_json::json;

use crate::args::InfoArgs;
use crate::{Outcome, model, output};

pub fn run(args: &InfoArgs) -> Outcome {
    let dirs = model::dirs(&args.model)?;
    let model = Model::open(&dirs)?;
    let tokenizer = Tokenizer::load(&dirs[0])?;
    let template = ChatTemplate::load(&dirs[0])?;
    let (config, report) = (&model.config, model.report());
    let elements: u64 = report.stored.values().map(|used| used.elements).sum();
    let sparse = (0..config.layers)
        .filter(|layer| config.layer_kind(*layer) == Some(LayerKind::Sparse))
        .count();
    let kv = KvShape::of(&model).bytes_per_position();
    let stored = |class: &TensorClass| report.stored.keys().any(|(stored, _)| stored == class);
    let classes: Vec<&str> =
        Int8Classes::default().iter().filter(stored).map(TensorClass::name).collect();
    if args.json {
        let stored: Vec<_> = report
            .stored
            .iter()
            .map(|((class, format), used)| {
                json!({
                    "class": class.name(), "format": format, "tensors": used.tensors,
                    "elements": used.elements, "bytes": used.bytes, "bits": used.bits(),
                })
            })
            .collect();
        output::print_json(&json!({
            "family": config.family.row().name,
            "parameters": elements,
            "bytes": report.bytes(),
            "layers": config.layers,
            "sparse_layers": sparse,
            "hidden": config.hidden_size,
            "vocab": config.vocab_size,
            "max_position": config.max_position,
            "experts": config.moe.experts,
            "top_k": config.moe.top_k,
            "shared_experts": config.moe.shared_experts,
            "stored": stored,
            "indexer": presence(&report.indexer),
            "mtp": presence(&report.mtp),
            "stop_ids": config.stop_ids,
            "scoring_prefix": config.family.row().scoring_prefix,
            "kv_bytes_per_token": kv,
            "tokenizer": tokenizer.is_some(),
            "chat_template": template.is_some(),
            "int8_activation_classes": classes,
            "numerics_version": NUMERICS_VERSION,
            "warnings": report.warnings,
        }));
        return Ok(());
    }
    let stops: Vec<String> = config
        .stop_ids
        .iter()
        .map(|id| {
            let text = tokenizer.as_ref().and_then(|t| t.decode(&[*id], false).ok());
            text.map_or_else(|| id.to_string(), |text| format!("{id} {text}"))
        })
        .collect();
    let facts = [
        ("family", config.family.row().name.to_owned()),
        (
            "directories",
            model.dirs.iter().map(|d| d.display().to_string()).collect::<Vec<_>>().join(", "),
        ),
        ("parameters", output::count(elements)),
        (
            "stored",
            format!(
                "{} in {}",
                output::bytes(report.bytes()),
                output::counted(report.shards.found, "file")
            ),
        ),
        ("layers", format!("{} ({} sparse)", config.layers, sparse)),
        ("attention", attention(config)),
        ("experts", experts(config)),
        ("vocabulary", output::count(config.vocab_size as u64)),
        (
            "context",
            format!(
                "{} tokens, {} of state each",
                output::count(config.max_position as u64),
                output::bytes(kv as u64)
            ),
        ),
        (
            "memory",
            format!(
                "dense weights {} stay; experts {} stream, all or some",
                output::bytes(report.bytes() - report.class_bytes(TensorClass::Experts)),
                output::bytes(report.class_bytes(TensorClass::Experts))
            ),
        ),
        ("indexer", presence(&report.indexer)),
        ("MTP layer", presence(&report.mtp)),
        ("stop ids", if stops.is_empty() { "none".to_owned() } else { stops.join(", ") }),
        ("scoring prefix", prefix(config.family)),
        (
            "tokenizer",
            tokenizer.map_or("none: only --ids can be run".to_owned(), |t| {
                format!("{} ids", output::count(t.vocab_size() as u64))
            }),
        ),
        ("chat template", if template.is_some() { "yes" } else { "none" }.to_owned()),
        (
            "int8 activations",
            format!("{} (numerics {NUMERICS_VERSION}); the rest in f32", classes.join(", ")),
        ),
    ];
    let rows: Vec<Vec<String>> =
        facts.into_iter().map(|(name, value)| vec![name.to_owned(), value]).collect();
    say_part!("{}", output::table(&rows, &[]));
    say!("");
    let header = ["class", "format", "tensors", "numbers", "bytes", "bits each"];
    let mut rows = vec![header.iter().map(|cell| (*cell).to_owned()).collect::<Vec<_>>()];
    for ((class, format), used) in &report.stored {
        rows.push(vec![
            class.name().to_owned(),
            format.clone(),
            output::count(used.tensors as u64),
            output::count(used.elements),
            output::bytes(used.bytes),
            format!("{:.2}", used.bits()),
        ]);
    }
    say_part!("{}", output::table(&rows, &[false, false, true, true, true, true]));
    for warning in &report.warnings {
        say!("warning: {warning}");
    }
    Ok(())
}

fn attention(config: &Config) -> String {
    match &config.attention {
        Attention::Mla { q_lora, kv_lora, nope, rope, v_dim, indexer } => {
            let sparse = indexer.as_ref().map_or(String::new(), |indexer| {
                format!(", the best {} keys of {} index heads", indexer.topk, indexer.heads)
            });
            format!(
                "latent, {} heads of {nope}+{rope}/{v_dim}, latents {q_lora} and {kv_lora}{sparse}",
                config.heads
            )
        }
        Attention::Gqa { kv_heads, head_dim, .. } => {
            format!("{} heads of {head_dim} over {kv_heads} key heads", config.heads)
        }
    }
}

fn experts(config: &Config) -> String {
    let moe = &config.moe;
    let groups = if moe.n_group > 1 {
        format!(", best {} of {} groups", moe.topk_group, moe.n_group)
    } else {
        String::new()
    };
    let shared = match moe.shared_experts {
        0 => String::new(),
        count => format!(" + {count} shared"),
    };
    format!(
        "{} per layer of width {}, top-{}{shared}{groups}",
        moe.experts, moe.expert_intermediate, moe.top_k
    )
}

fn prefix(family: Family) -> String {
    let tokens = family.row().scoring_prefix;
    if tokens.is_empty() { "none".to_owned() } else { tokens.concat() }
}

/// Presence for people.
pub fn presence(presence: &Presence) -> String {
    match presence {
        Presence::NotConfigured => "not configured".to_owned(),
        Presence::Absent => "absent".to_owned(),
        Presence::Present => "present".to_owned(),
    }
}
