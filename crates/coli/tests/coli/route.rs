use std::path::PathBuf;

use experts::TraceWriter;

use crate::support::{Outcome, arg, run};

/// A trace of ten passes of two rows over layers 1 to 3: an expert is followed by the next one,
/// and by the expert after that in every other pass.
fn trace(dir: &tempfile::TempDir) -> PathBuf {
    let path = dir.path().join("trace");
    let mut writer = std::fs::File::create(&path).map(TraceWriter::new).unwrap();
    let mut call = 0;
    for pass in 0..10u32 {
        for layer in 1..4 {
            for row in 0..2 {
                let step = if pass % 2 == 0 { 1 } else { 2 };
                let first = pass % 4 + row + step * layer;
                let routes = [(first, 0.75), (first + 20, 0.25)];
                writer.row(call, row, layer as usize, routes.into_iter()).unwrap();
            }
            call += 1;
        }
    }
    path
}

fn pairs(trace: &std::path::Path, out: &std::path::Path, more: &[&str]) -> Outcome {
    run(&[&["route", "pairs", "--trace", arg(trace), "--out", arg(out)][..], more].concat())
}

#[test]
fn a_table_is_counted_from_a_trace_and_may_be_made_again() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, out) = (trace(&dir), dir.path().join(".coli_pairs"));
    let first = pairs(&trace, &out, &[]).expect(0);
    let text = std::fs::read_to_string(&out).unwrap();
    let lines = text.lines().count() - 1;
    assert!(text.starts_with(&format!("COLIPAIRS 1 {lines}\n1 1 ")), "{text}");
    for needle in [&format!("wrote {lines} lines")[..], "60 rows in 30 calls", "predicting 2"] {
        assert!(first.stdout.contains(needle), "{needle} is missing from {}", first.stdout);
    }
    assert!(first.stdout.contains("1 layer ahead"), "{}", first.stdout);
    assert!(first.stdout.contains("2 layers ahead"), "{}", first.stdout);

    let json = pairs(&trace, &out, &["--json"]).expect(0).json();
    assert_eq!(std::fs::read_to_string(&out).unwrap(), text);
    assert_eq!((&json["lines"], &json["top_k"]), (&lines.into(), &2.into()));
    assert_eq!((&json["rows"], &json["calls"]), (&60.into(), &30.into()));
    for (at, selections) in [(0, 80), (1, 40)] {
        let recall = json["recall"][at]["recall"].as_f64().unwrap();
        assert!(recall > 0.3 && recall <= 1.0, "{json}");
        assert_eq!(json["recall"][at]["selections"], selections);
    }
    let names = std::fs::read_dir(dir.path()).unwrap().count();
    assert_eq!(names, 2);
}

#[test]
fn only_a_coupling_table_is_overwritten() {
    let dir = tempfile::tempdir().unwrap();
    let trace = trace(&dir);
    let out = dir.path().join("precious");
    for text in ["", "precious\n", "COLIPAIRS 2 0\n", "COLIPAIRS 1 1\n"] {
        std::fs::write(&out, text).unwrap();
        let refused = pairs(&trace, &out, &[]).expect(2);
        assert!(refused.stderr.contains("precious"), "{}", refused.stderr);
        assert_eq!(std::fs::read_to_string(&out).unwrap(), text);
    }
    let before = std::fs::read(&trace).unwrap();
    pairs(&trace, &trace, &[]).expect(2);
    assert_eq!(std::fs::read(&trace).unwrap(), before);
    pairs(&trace, dir.path(), &[]).expect(2);
    std::fs::write(&out, "COLIPAIRS 1 0\n").unwrap();
    pairs(&trace, &out, &[]).expect(0);
}

#[test]
fn an_unusable_trace_is_exit_2_names_the_line_and_writes_nothing() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, out) = (dir.path().join("trace"), dir.path().join("out"));
    let missing = pairs(&trace, &out, &[]).expect(2);
    assert!(missing.stderr.contains("trace: cannot be read"), "{}", missing.stderr);
    for (text, needle) in [
        ("0 0 1 2:0.5\n0 1 1 nonsense\n", "trace line 2: expected <call>"),
        ("0 0 1 2:0.5\n0 0 1 2:0.5\n", "trace line 2: expected a row after 0"),
        ("", "0 rows in 0 calls"),
        ("0 0 1 2:0.5\n", "1 row in 1 call,"),
    ] {
        std::fs::write(&trace, text).unwrap();
        let refused = pairs(&trace, &out, &[]).expect(2);
        assert!(refused.stderr.contains(needle), "{text}: {}", refused.stderr);
        assert!(refused.stdout.is_empty() && !out.exists(), "{text}");
    }
}

#[test]
fn a_table_that_cannot_be_written_is_exit_1() {
    let dir = tempfile::tempdir().unwrap();
    let failed = pairs(&trace(&dir), &dir.path().join("no/where"), &[]).expect(1);
    assert!(failed.stderr.contains("no/where"), "{}", failed.stderr);
}

#[test]
fn a_layer_without_neighbours_but_one_has_no_recall_two_layers_ahead() {
    let dir = tempfile::tempdir().unwrap();
    let (trace, out) = (dir.path().join("trace"), dir.path().join("out"));
    std::fs::write(&trace, "0 0 1 2:0.5\n1 0 2 3:0.5\n").unwrap();
    let said = pairs(&trace, &out, &[]).expect(0).stdout;
    assert!(said.contains("100.0% 1 layer ahead, nothing to predict 2 layers ahead"), "{said}");
    let json = pairs(&trace, &out, &["--json"]).expect(0).json();
    assert!(json["recall"][1]["recall"].is_null(), "{json}");
}
