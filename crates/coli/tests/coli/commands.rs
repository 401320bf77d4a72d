use std::io::Write;
use std::process::Stdio;

use crate::support::{arg, coli, finish, fixture, hummingbird, run};

#[test]
fn run_finds_the_bundled_model_in_a_checkout_and_writes_text_and_figures() {
    let text = run(&["run", "Once upon a time", "--max-tokens", "12"]).expect(0);
    assert!(text.stdout.trim().len() > 10, "{}", text.stdout);
    for figure in ["tok/s", "first token after", "hit rate", "read", "peak RAM"] {
        assert!(text.stderr.contains(figure), "{figure} is missing from {}", text.stderr);
    }
    let deep = hummingbird().join("heldout");
    let nested =
        finish(coli().current_dir(&deep).args(["run", "Once upon a time", "--max-tokens", "12"]));
    assert_eq!(nested.expect(0).stdout, text.stdout);
}

#[test]
fn run_outside_a_checkout_unpacks_the_bundled_model_once() {
    let (home, elsewhere) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let mut command = coli();
    command.current_dir(elsewhere.path()).env("XDG_DATA_HOME", home.path());
    command.args(["run", "Once upon a time", "--max-tokens", "8"]);
    let first = finish(&mut command).expect(0);
    assert!(first.stderr.contains("Unpacked"), "{}", first.stderr);
    let second = finish(&mut command).expect(0);
    assert!(!second.stderr.contains("Unpacked"), "{}", second.stderr);
    assert_eq!(first.stdout, second.stdout);
    // A damaged copy is made anew.
    let models = home.path().join("colibri/models");
    let dir = std::fs::read_dir(models).unwrap().next().unwrap().unwrap().path();
    std::fs::write(dir.join("hummingbird/config.json"), "{}").unwrap();
    let third = finish(&mut command).expect(0);
    assert_eq!(first.stdout, third.stdout);
}

#[test]
fn run_json_is_one_object_with_the_stable_keys() {
    let json =
        run(&["run", "The", "--max-tokens", "5", "--json", "--fingerprint"]).expect(0).json();
    for key in [
        "text",
        "ids",
        "fingerprint",
        "tok_per_s",
        "ttft_ms",
        "hit_rate",
        "bytes_read",
        "peak_rss_bytes",
    ] {
        assert!(!json[key].is_null(), "{key} is missing from {json}");
    }
    assert_eq!(json["ids"].as_array().unwrap().len(), 5);
    assert_eq!(json["fingerprint"].as_str().unwrap().len(), 64);
}

#[test]
fn ids_in_give_ids_out_and_need_no_tokenizer() {
    let dir = fixture("olmoe-mha");
    let args = ["run", "--model", arg(&dir), "--ids", "3,4,5", "--max-tokens", "4"];
    let out = run(&args).expect(0).stdout;
    assert_eq!(out.trim().split(',').filter(|id| id.parse::<u32>().is_ok()).count(), 4, "{out}");
}

#[test]
fn a_seed_repeats_a_sampled_text_and_one_that_was_drawn_is_printed() {
    let args = ["run", "The", "--max-tokens", "20", "--temperature", "1.2"];
    let drawn = run(&args).expect(0);
    let seed = drawn.stderr.lines().find_map(|line| line.strip_prefix("seed ")).unwrap();
    let again = finish(coli().args(args).args(["--seed", seed])).expect(0);
    assert_eq!(again.stdout, drawn.stdout);
}

#[test]
fn a_prompt_comes_from_stdin_on_request() {
    let mut child = coli()
        .args(["run", "-", "--max-tokens", "6", "--json"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(b"Once upon a time").unwrap();
    let piped = child.wait_with_output().unwrap();
    assert!(piped.status.success());
    let plain = run(&["run", "Once upon a time", "--max-tokens", "6", "--json"]).expect(0).json();
    let piped: serde_json::Value = serde_json::from_slice(&piped.stdout).unwrap();
    assert_eq!(piped["ids"], plain["ids"]);
}

#[test]
fn wrong_usage_is_exit_2_and_says_what_is_wrong() {
    let long = "word ".repeat(3000);
    let cases: [(&[&str], &str); 16] = [
        (&["run"], "prompt"),
        (&["run", ""], "empty"),
        (&["run", &long], "2048"),
        (&["run", "x", "--ram", "-1"], "--ram"),
        (&["run", "x", "--ram", "0.0001"], "--ram"),
        (&["run", "x", "--threads", "0"], "--threads"),
        (&["run", "x", "--ctx", "99999"], "--ctx"),
        (&["run", "x", "--activations", "int4"], "int8 or f32"),
        (&["run", "x", "--isa", "sse9"], "sse9"),
        (&["run", "x", "--temperature", "nan"], "temperature"),
        (&["run", "x", "--top-k", "5"], "--top-k"),
        (&["run", "x", "--max-tokens", "0"], "--max-tokens"),
        (&["run", "x", "--ids", "1"], "cannot be used with"),
        (&["run", "--ids", "999999"], "999999"),
        (&["run", "x", "--model", "/nonexistent"], "/nonexistent"),
        (&["run", "x", "--unknown"], "--unknown"),
    ];
    for (args, needle) in cases {
        let out = run(args).expect(2);
        assert!(out.stderr.contains(needle), "{args:?}: {}", out.stderr);
        assert!(out.stdout.is_empty(), "{args:?}: {}", out.stdout);
    }
}

#[test]
fn environment_variables_are_options_parsed_as_strictly() {
    let out = finish(coli().args(["run", "x"]).env("COLI_RAM", "lots")).expect(2);
    assert!(out.stderr.contains("lots"), "{}", out.stderr);
    let out = finish(coli().args(["run", "x"]).env("COLI_ISA", "neon")).expect(2);
    assert!(out.stderr.contains("neon"), "{}", out.stderr);
    let out = finish(coli().args(["info"]).env("COLI_RAMM", "1")).expect(2);
    assert!(out.stderr.contains("COLI_RAMM"), "{}", out.stderr);
    let args = ["run", "x", "--max-tokens", "3", "--json"];
    let json = finish(coli().args(args).env("COLI_ISA", "scalar").env("COLI_CTX", "64")).expect(0);
    let json = json.json();
    assert_eq!((&json["isa"], &json["context"]), (&"scalar".into(), &64.into()));
}

#[test]
fn oracle_reports_matches_and_fails_on_a_mismatch() {
    let dir = fixture("glm-dsa");
    let reference = dir.join("ref.json");
    let args = ["oracle", "--model", arg(&dir), "--activations", "f32", "--reference"];
    let out = finish(coli().args(args).arg(&reference)).expect(0);
    assert!(out.stdout.starts_with("oracle: "), "{}", out.stdout);

    let text = std::fs::read_to_string(&reference).unwrap();
    let mut json: serde_json::Value = serde_json::from_str(&text).unwrap();
    let wrong = (json["tf_pred"][5].as_u64().unwrap() + 1) % 100;
    json["tf_pred"][5] = wrong.into();
    let temporary = tempfile::tempdir().unwrap();
    let changed = temporary.path().join("ref.json");
    std::fs::write(&changed, json.to_string()).unwrap();
    let out = finish(coli().args(args).arg(&changed).arg("--json")).expect(1).json();
    let positions = json["full_ids"].as_array().unwrap().len();
    assert_eq!(out["mismatches"], 1);
    assert_eq!(out["match"], positions - 1);
    assert_eq!(out["mismatch_list"][0]["position"], 5);
}

#[test]
fn score_puts_the_family_prefix_once_and_can_leave_it_out() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("text.txt");
    std::fs::write(&path, "The people of the land went to the city.").unwrap();
    let with = run(&["score", "--text", arg(&path), "--json"]).expect(0).json();
    assert_eq!(with["prefix_ids"], serde_json::json!([1, 2]));
    std::fs::write(&path, "[gMASK]<sop>The people of the land went to the city.").unwrap();
    let given = run(&["score", "--text", arg(&path), "--json"]).expect(0).json();
    std::fs::write(&path, "The people of the land went to the city.").unwrap();
    let without = run(&["score", "--text", arg(&path), "--prefix", "", "--json"]).expect(0).json();
    assert_eq!(without["prefix_ids"], serde_json::json!([]));
    // The first token needs something before it.
    assert_eq!(with["tokens"].as_u64().unwrap(), without["tokens"].as_u64().unwrap() + 1);
    // A prefix that stands in the text already is neither put there again nor scored.
    assert_eq!((&given["tokens"], &given["nll"]), (&with["tokens"], &with["nll"]));
}

#[test]
fn score_of_a_context_and_continuation_is_that_of_the_text_it_makes() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("cases.jsonl");
    let cases = "{\"context\": \"The people\", \"continuation\": \" of the land\"}\n\n\
                 {\"text\": \"The people of the land\"}\n";
    std::fs::write(&path, cases).unwrap();
    let json = run(&["score", arg(&path), "--json"]).expect(0).json();
    let cases = json["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 2);
    assert!(cases[0]["tokens"].as_u64() < cases[1]["tokens"].as_u64());
    assert!(cases[0]["nll"].as_f64() < cases[1]["nll"].as_f64());
    std::fs::write(&path, "{\"text\": \"a b\"}\n{\"context\": \"a\"}\n").unwrap();
    let out = run(&["score", arg(&path)]).expect(2);
    assert!(out.stderr.contains("line 2"), "{}", out.stderr);
}

#[test]
fn info_and_doctor_agree_with_the_engine_on_every_fixture() {
    let names = std::fs::read_dir(fixture("")).unwrap();
    for dir in names.map(|entry| entry.unwrap().path()) {
        let json = run(&["info", "--model", arg(&dir), "--json"]).expect(0).json();
        assert!(json["parameters"].as_u64().unwrap() > 1000, "{json}");
        // Fixtures have no tokenizer: a warning, exit 1, but nothing fails.
        let out = run(&["doctor", "--model", arg(&dir), "--deep", "--json"]).expect(1).json();
        let states: Vec<&str> =
            out.as_array().unwrap().iter().map(|c| c["state"].as_str().unwrap()).collect();
        assert!(!states.contains(&"fail"), "{}: {out}", dir.display());
        let load = out.as_array().unwrap().iter().find(|c| c["id"] == "load").unwrap();
        assert_eq!(load["state"], "pass", "{}: {out}", dir.display());
    }
    let out = run(&["doctor", "--deep", "--json"]).expect(0).json();
    assert!(out.as_array().unwrap().iter().all(|check| check["state"] == "pass"), "{out}");
}

#[test]
fn doctor_fails_a_damaged_model_with_exit_2() {
    let dir = crate::support::copy(&hummingbird());
    let path = dir.path().join("model.safetensors");
    let len = std::fs::metadata(&path).unwrap().len();
    std::fs::File::options().write(true).open(&path).unwrap().set_len(len - 1).unwrap();
    let out = run(&["doctor", "--model", arg(dir.path()), "--json"]).expect(2).json();
    let container = out.as_array().unwrap().iter().find(|c| c["id"] == "container").unwrap();
    assert_eq!(container["state"], "fail");
    assert!(container["detail"].as_str().unwrap().contains("model.safetensors"), "{out}");
}

#[test]
fn chat_answers_continues_and_forgets() {
    let mut child = coli()
        .args(["chat", "--max-tokens", "4"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    let lines = "Tell me about the sea.\n/more\n/stats\n/reset\n/nonsense\n/quit\nnot read\n";
    child.stdin.take().unwrap().write_all(lines.as_bytes()).unwrap();
    let out = child.wait_with_output().unwrap();
    assert!(out.status.success());
    let text = String::from_utf8(out.stdout).unwrap();
    for needle in ["messages", "forgotten", "There is no /nonsense"] {
        assert!(text.contains(needle), "{needle} is missing from {text}");
    }
}

#[test]
fn help_teaches_every_command() {
    let help = run(&["--help"]).expect(0).stdout;
    let commands =
        ["run", "chat", "oracle", "score", "info", "doctor", "convert", "synth", "bench", "route"];
    for command in commands {
        assert!(help.contains(&format!("  {command} ")), "{command} is missing");
        let own = run(&[command, "--help"]).expect(0).stdout;
        assert!(own.contains("Usage: "), "{own}");
    }
}

#[test]
fn a_reader_that_goes_away_ends_the_program_quietly() {
    let mut child = coli()
        .args(["run", "Once upon a time", "--max-tokens", "200"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    drop(child.stdout.take());
    let out = child.wait_with_output().unwrap();
    assert_eq!(out.status.code(), Some(0));
    assert!(!String::from_utf8_lossy(&out.stderr).contains("panicked"));
}
