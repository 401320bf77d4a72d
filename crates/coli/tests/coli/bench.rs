use crate::support::{arg, fixture, hummingbird, root, run};

#[test]
fn a_profile_has_every_phase_and_sums_to_the_time_of_the_run() {
    let model = hummingbird();
    let args = ["run", "--model", arg(&model), "--ids", "5,6,7,8", "--max-tokens", "12"];
    let json = run(&[&args[..], &["--json", "--profile"]].concat()).expect(0).json();
    let mut sum_s = 0.0;
    for stage in ["prefill", "decode"] {
        let phases = json["phases"][stage].as_object().unwrap();
        let names: Vec<&str> = phases.keys().map(String::as_str).collect();
        let want = [
            "attention",
            "router",
            "experts_local",
            "experts_remote",
            "disk_wait",
            "head",
            "other",
        ];
        assert_eq!(names, want);
        sum_s += phases.values().map(|seconds| seconds.as_f64().unwrap()).sum::<f64>();
    }
    let decode_s = 11.0 / json["tok_per_s"].as_f64().unwrap();
    let wall_s = json["ttft_ms"].as_f64().unwrap() / 1e3 + decode_s;
    assert!((sum_s - wall_s).abs() <= 0.02 * wall_s + 1e-3, "{sum_s} s of {wall_s} s");
}

#[test]
fn a_batch_has_the_logits_of_each_sequence_alone() {
    let model = fixture("glm-dsa");
    let args = ["bench", "decode", "--model", arg(&model), "--batch", "3", "--tokens", "2"];
    let json =
        run(&[&args[..], &["--reps", "1", "--ram", "2", "--json"]].concat()).expect(0).json();
    assert_eq!(json["batch"], 3);
    assert!(json["allowed_gain"].as_f64().unwrap() > 1.0);
}

#[test]
fn benches_refuse_what_they_cannot_measure() {
    let model = fixture("glm-dsa");
    for (args, what) in [
        (&["bench", "decode", "--tokens", "18446744073709551615"][..], "lower --tokens"),
        (&["bench", "decode", "--batch", "1000000"], "at most"),
        (&["bench", "prefill", "--tokens", "100000"], "lower --tokens"),
        (&["bench", "ux", "--ctx", "1"], "lower --tokens"),
        (&["bench", "kernels", "--rows", "1000000000"], "at most"),
        (&["bench", "kernels", "--rows", "0"], "at least 1"),
        (&["bench", "kernels", "--isa", "sse9"], "unknown instruction-set level"),
        (&["bench", "kernels", "--formats", "f32", "--activations", "int8"], "--activations f32"),
    ] {
        let model = if args[1] == "kernels" { vec![] } else { vec!["--model", arg(&model)] };
        let outcome = run(&[args, &model].concat()).expect(2);
        assert!(outcome.stderr.contains(what), "{args:?}: {}", outcome.stderr);
    }
}

#[test]
fn a_level_that_the_cpu_lacks_is_refused_with_those_it_has() {
    if numerics::Level::Amx.is_available() {
        println!("SKIPPED: this CPU has amx");
        return;
    }
    let model = hummingbird();
    let args = ["run", "--model", arg(&model), "--ids", "5", "--isa", "amx"];
    let outcome = run(&args).expect(2);
    assert!(outcome.stderr.contains("scalar"), "{}", outcome.stderr);
}

#[test]
fn cache_policies_are_compared_on_a_trace_and_what_is_none_is_refused() {
    let trace = root().join("fixtures/routes/hummingbird-prose.txt");
    let args = ["bench", "cache", "--trace", arg(&trace), "--json"];
    let json = run(&args).expect(0).json();
    for size in json["sizes"].as_array().unwrap() {
        let rate = |policy: &str| size["hit_rates"][policy].as_f64().unwrap();
        assert!(rate("lru") < rate("ours") && rate("ours") < rate("belady"), "{json}");
        let gap = size["belady_gap"].as_f64().unwrap();
        assert!((gap - (rate("belady") - rate("ours"))).abs() < 1e-12, "{json}");
    }
    let dir = tempfile::tempdir().unwrap();
    let bad = dir.path().join("trace");
    for (text, what) in [("", "no calls"), ("hello\n", "line 1")] {
        std::fs::write(&bad, text).unwrap();
        let outcome = run(&["bench", "cache", "--trace", arg(&bad)]).expect(2);
        assert!(outcome.stderr.contains(what), "{text:?}: {}", outcome.stderr);
    }
    run(&["bench", "cache", "--trace", arg(&dir.path().join("none"))]).expect(2);
}

#[test]
fn reads_keep_to_their_limit_and_mapped_files_take_none() {
    let model = hummingbird();
    let args = ["run", "--model", arg(&model), "--ids", "1,2", "--max-tokens", "2", "--json"];
    let outcome = run(&[&args[..], &["--io", "mmap", "--read-limit", "1"]].concat()).expect(2);
    assert!(outcome.stderr.contains("--read-limit has no effect"), "{}", outcome.stderr);
    for limit in ["0", "nan", "fast", "-1"] {
        run(&[&args[..], &["--read-limit", limit]].concat()).expect(2);
    }
    let started = std::time::Instant::now();
    let json = run(&[&args[..], &["--read-limit", "0.02"]].concat()).expect(0).json();
    // A lower bound only: a busy machine takes longer.
    let least_s = json["bytes_read"].as_f64().unwrap() / 0.02e9;
    assert!(started.elapsed().as_secs_f64() >= least_s, "{json}");
}
