use std::path::Path;

use crate::support::{Outcome, arg, coli, finish, hummingbird};

/// Runs with a place of its own for what is kept.
fn run_in(state: &Path, args: &[&str]) -> Outcome {
    let model = hummingbird();
    let model = ["--model", arg(&model)];
    finish(coli().args(args).args(model).env("XDG_STATE_HOME", state))
}

/// The file of what was kept, if any.
fn kept_in(state: &Path) -> Option<std::path::PathBuf> {
    let dir = std::fs::read_dir(state.join("colibri/tuned")).ok()?;
    dir.map(|entry| entry.unwrap().path()).next()
}

const TUNE: [&str; 5] = ["tune", "--tokens", "2", "--prompt", "300"];
const RUN: [&str; 5] = ["run", "--ids", "5,6,7", "--max-tokens", "2"];

#[test]
fn settings_are_kept_used_where_no_flag_says_otherwise_and_forgotten() {
    let state = tempfile::tempdir().unwrap();
    let state = state.path();
    let json = run_in(state, &[&TUNE[..], &["--json"]].concat()).expect(0).json();
    let path = kept_in(state).unwrap();
    assert_eq!(json["kept_in"], arg(&path));
    // What fits in memory is read once: readers and guesses make no difference.
    assert_eq!((&json["io"], &json["prefetch"]), (&().into(), &().into()));
    let trials = json["trials"].as_array().unwrap();
    let of = |setting: &str| trials.iter().filter(|trial| trial["setting"] == setting).count();
    // The default chunk is as long as the prompt.
    assert_eq!((of("io"), of("prefill-chunk")), (0, 3));
    assert!(trials.iter().all(|trial| trial["tok_per_s"].as_f64().unwrap() > 0.0), "{json}");
    let mut settings = trials.iter().map(|trial| &trial["setting"]).collect::<Vec<_>>();
    settings.dedup();
    for setting in settings {
        let kept =
            |trial: &&serde_json::Value| &trial["setting"] == setting && trial["kept"] == true;
        assert_eq!(trials.iter().filter(kept).count(), 1, "{json}");
    }

    let change = |from: &str, to: &str| {
        let text = std::fs::read_to_string(&path).unwrap();
        assert!(text.contains(from), "{text}");
        std::fs::write(&path, text.replace(from, to)).unwrap();
    };
    let threads = format!("\"threads\": {}", json["threads"]);
    change(&threads, "\"threads\": 3");
    let used = run_in(state, &RUN).expect(0);
    assert!(used.stderr.contains("settings of coli tune"), "{}", used.stderr);
    assert!(used.stderr.contains("| 3 threads |"), "{}", used.stderr);
    let flagged = run_in(state, &[&RUN[..], &["--threads", "1"]].concat()).expect(0);
    assert!(flagged.stderr.contains("| 1 thread |"), "{}", flagged.stderr);
    let ignored = run_in(state, &[&RUN[..], &["--no-tuned"]].concat()).expect(0);
    assert!(!ignored.stderr.contains("settings of coli tune"), "{}", ignored.stderr);
    assert_eq!(used.stdout, ignored.stdout);

    // Settings of something else are said and left alone.
    change("\"version\": 1", "\"version\": 9");
    let refused = run_in(state, &RUN).expect(0);
    assert!(refused.stderr.contains("its settings are not used"), "{}", refused.stderr);
    assert!(path.is_file());

    run_in(state, &["tune", "--forget"]).expect(0);
    assert_eq!(kept_in(state), None);
    let again = run_in(state, &["tune", "--forget"]).expect(0);
    assert!(again.stdout.contains("nothing was kept"), "{}", again.stdout);
}

#[test]
fn a_dry_run_keeps_nothing_and_a_ceiling_that_is_too_low_is_refused() {
    let state = tempfile::tempdir().unwrap();
    let state = state.path();
    let dry = run_in(state, &[&TUNE[..], &["--dry-run", "--prompt", "16"]].concat());
    // A flag given twice is a usage error, not the second one's value.
    assert_eq!(dry.code, 2, "{}", dry.stderr);
    let dry = run_in(state, &["tune", "--tokens", "2", "--prompt", "16", "--dry-run"]).expect(0);
    assert!(dry.stdout.contains("kept nowhere"), "{}", dry.stdout);
    assert_eq!(kept_in(state), None);
    let low = run_in(state, &["tune", "--ram", "0.01"]).expect(2);
    assert!(low.stderr.contains("needs at least --ram"), "{}", low.stderr);
}
