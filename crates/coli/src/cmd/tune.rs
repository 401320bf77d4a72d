//! `coli tune`: settings that are fastest on this machine, measured and kept.

use experts::ReadAhead;
use lab::tune::{self, Measurement, Trial, TuneOptions, tune};
use serde_json::json;

use crate::args::TuneArgs;
use crate::failure::Failure;
use crate::{Outcome, apart, model, output, tuned, workers};

pub fn run(args: &TuneArgs) -> Outcome {
    // The flags say where to begin, and not what was found before.
    workers::refuse(&args.engine.cluster, "coli tune")?;
    let options = model::engine_options(&args.engine)?;
    if let Some(what) = &args.measurement {
        let what: Measurement = serde_json::from_str(what)
            .map_err(|error| Failure::usage(format!("--measurement: {error}")))?;
        apart::end_with_the_parent();
        say!("{}", tune::measure(&options, &what)?);
        return Ok(());
    }
    if matches!(options.read_ahead, ReadAhead::Pairs { .. }) {
        return Err(Failure::usage(
            "coli tune does not try --prefetch pairs; give router or off to begin with",
        ));
    }
    if args.forget {
        let forgotten = tuned::forget(&options.dirs)?;
        if args.json {
            output::print_json(&json!({ "forgotten": forgotten }));
        } else {
            match forgotten {
                Some(path) => say!("{} is forgotten", path.display()),
                None => say!("nothing was kept for this model"),
            }
        }
        return Ok(());
    }
    if options.route_trace.is_some() {
        return Err(Failure::usage("coli tune records no route trace"));
    }
    if !args.dry_run {
        tuned::prepare(&options.dirs)?;
    }
    let lengths = TuneOptions { tokens: args.tokens, prompt: args.prompt };
    let mut told = |trial: &Trial| {
        if !args.json {
            say!("{}", line(trial));
        }
    };
    let found = tune(&options, lengths, &mut measured_apart, &mut told)?;
    let kept = (!args.dry_run).then(|| tuned::store(&options.dirs, &found)).transpose()?;
    if args.json {
        let trials = found.trials.iter().map(|trial| {
            let rates = trial.tok_per_s.as_ref();
            json!({
                "setting": trial.knob.name(),
                "value": trial.value,
                "tok_per_s": rates.map(|rates| rates.median).ok(),
                "problem": rates.err(),
                "kept": trial.kept,
            })
        });
        output::print_json(&json!({
            "threads": found.settings.threads,
            "prefill_chunk": found.settings.prefill_chunk,
            "io": found.settings.io.map(|mode| mode.name()),
            "prefetch": found.settings.prefetch.map(|on| if on { "router" } else { "off" }),
            "ram_bytes": found.ram_bytes,
            "trials": trials.collect::<Vec<_>>(),
            "kept_in": kept,
        }));
        return Ok(());
    }
    say!("settings: {}", found.settings);
    match kept {
        Some(path) => say!("kept in {}; coli tune --forget drops them", path.display()),
        None => say!("kept nowhere (--dry-run)"),
    }
    Ok(())
}

/// Makes a measurement in a process of its own, with the flags of this one.
fn measured_apart(what: &Measurement) -> Result<f64, String> {
    let what = serde_json::to_string(what).map_err(|error| error.to_string())?;
    let said = apart::measured(&what)?;
    said.parse().map_err(|_| format!("measured {said:?}"))
}

/// A trial for people.
fn line(trial: &Trial) -> String {
    let rate = match &trial.tok_per_s {
        Ok(rates) => {
            let (least, greatest) = rates.spread;
            format!("{:9.2} tok/s ({least:.2} to {greatest:.2})", rates.median)
        }
        Err(why) => why.clone(),
    };
    let kept = if trial.kept { "  <- kept" } else { "" };
    format!("{:<14}{:<10}{rate}{kept}", trial.knob.name(), trial.value)
}
