//! The layout of a file, the way it is read, what is read ahead and what is kept change no bit.

use std::path::{Path, PathBuf};

use container::{Layout, Model};
use experts::{IoMode, ReadAhead};
use formats::Format;
use lab::convert::{Conversion, SHARD_BYTES};
use lab::plan::Choice;
use numerics::Activations;
use runtime::{Engine, EngineOptions, Fingerprint, Want};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Every fixture and the bundled model.
fn models() -> Vec<PathBuf> {
    let fixtures = std::fs::read_dir(root().join("fixtures/oracle")).unwrap();
    let mut models: Vec<_> = fixtures.map(|entry| entry.unwrap().path()).collect();
    models.retain(|path| path.join("config.json").is_file());
    models.sort();
    models.push(root().join("models/hummingbird"));
    models
}

fn converted(source: &Path, to: &Path, layout: Layout) {
    let choice = Choice::default();
    let source = [source.to_owned()];
    let conversion = Conversion::plan(&source, to, &choice, layout, SHARD_BYTES, 2).unwrap();
    conversion.run(&mut |_, _| {}).unwrap();
}

fn options(dir: &Path, activations: Activations) -> EngineOptions {
    EngineOptions {
        ram_bytes: Some(2_000_000_000),
        threads: Some(2),
        activations,
        read_ahead: ReadAhead::Off,
        prefill_chunk: 4,
        ..EngineOptions::new(vec![dir.to_owned()])
    }
}

/// Fingerprint of the logits of some tokens, a few of them fed one by one.
fn fingerprint(options: &EngineOptions) -> (Engine, String) {
    let engine = Engine::open(options, &mut |_, _| {}).unwrap();
    let vocab = engine.config().vocab_size as u32;
    let tokens: Vec<u32> = (0..24).map(|i| (i * 7919 + 11) % vocab).collect();
    let mut session = engine.session().unwrap();
    let mut fingerprint = Fingerprint::default();
    let (prompt, rest) = tokens.split_at(12);
    for tokens in std::iter::once(prompt).chain(rest.chunks(1)) {
        let mut each = |hidden: &[f32]| engine.each_logits(hidden, |row| fingerprint.add(row));
        engine.prefill(&mut session, tokens, Want::All, &mut each, &mut |_| true).unwrap();
    }
    let hex = fingerprint.hex();
    (engine, hex)
}

#[test]
fn layouts_readers_and_read_ahead_give_the_bits_of_the_source() {
    let (mut direct, mut uring, mut mapped, mut coded, mut guessed) = (0, 0, 0, 0, 0);
    for source in models() {
        let name = source.display();
        let dir = tempfile::tempdir().unwrap();
        let native = dir.path().join("native");
        converted(&source, &native, Layout::R16k4);
        let records = Model::open(std::slice::from_ref(&native)).unwrap().shards.records().len();
        assert!(records > 0, "{name}");
        for mode in [Activations::F32, Activations::Int8] {
            let (_, want) = fingerprint(&options(&source, mode));
            let same = |options: &EngineOptions, what: &str| {
                let (engine, got) = fingerprint(options);
                assert_eq!(got, want, "{name} {mode} {what}");
                engine
            };
            let plain = options(&native, mode);
            let with = |io| EngineOptions { io: Some(io), ..plain.clone() };
            same(&with(IoMode::Buffered), "buffered");
            let engine = same(&with(IoMode::Direct), "direct");
            direct += usize::from(engine.io() == IoMode::Direct);
            let engine = same(&with(IoMode::Uring), "uring");
            uring += usize::from(engine.io() == IoMode::Uring);
            let engine = same(&with(IoMode::Mmap), "mmap");
            mapped += usize::from(engine.io() == IoMode::Mmap);
            let mut two = with(IoMode::Direct);
            two.cache_experts = Some(2);
            same(&two, "two experts per layer");
            // Canonical files through every reader too: experts lie at any offset there.
            let mut foreign = options(&source, mode);
            foreign.io = Some(IoMode::Uring);
            same(&foreign, "canonical");
            // A cache of about half of the experts, with guesses.
            let mut small = with(IoMode::Direct);
            let engine = Engine::open(&small, &mut |_, _| {}).unwrap();
            small.cache_bytes = Some(engine.cache_bytes() / 2);
            small.read_ahead = ReadAhead::Router;
            small.always_idle = true;
            let engine = same(&small, "guesses");
            guessed += engine.experts().cache().map_or(0, |c| c.counters().issued.get());
        }
        // Coded, where there is int4, and back to rows.
        let as_coded = dir.path().join("coded");
        let plan = Conversion::plan(
            std::slice::from_ref(&native),
            &as_coded,
            &Choice::default(),
            Layout::R16k4Rans,
            SHARD_BYTES,
            2,
        );
        if let Ok(conversion) = plan {
            conversion.run(&mut |_, _| {}).unwrap();
            coded += 1;
            for mode in [Activations::F32, Activations::Int8] {
                let (_, want) = fingerprint(&options(&source, mode));
                let (_, got) = fingerprint(&options(&as_coded, mode));
                assert_eq!(got, want, "{name} {mode} coded");
            }
            let rows = dir.path().join("rows");
            converted(&as_coded, &rows, Layout::Canonical);
            same_tensors(&source, &rows);
        } else {
            let rows = dir.path().join("rows");
            converted(&native, &rows, Layout::Canonical);
            same_tensors(&source, &rows);
        }
    }
    println!("direct {direct}, uring {uring}, mapped {mapped}, coded {coded}, guessed {guessed}");
    assert!(mapped > 60 && coded >= 6, "mapped {mapped}, coded {coded}");
    assert!(guessed > 0, "nothing was read ahead");
    if direct == 0 {
        println!("SKIPPED: this file system has no direct reads");
    }
    if uring == 0 {
        println!("SKIPPED: this kernel has no io_uring");
    }
}

/// Every tensor of a model has the same bytes in a copy, but for what layouts leave out: the tag of
/// e8.
fn same_tensors(source: &Path, copy: &Path) {
    let open = |dir: &Path| Model::open(&[dir.to_owned()]).unwrap();
    let (source, copy) = (open(source), open(copy));
    let bytes = |model: &Model, range: &container::ByteRange| {
        let file = std::fs::read(model.shards.path(range.file)).unwrap();
        file[range.offset as usize..][..range.len as usize].to_vec()
    };
    for spec in container::tensor_specs(&source.config) {
        let (Some(a), Some(b)) = (source.find(&spec).unwrap(), copy.find(&spec).unwrap()) else {
            continue;
        };
        assert_eq!((a.format, b.layout), (b.format, Layout::Canonical), "{}", spec.name);
        // Bits behind a row's last weight are not kept.
        let whole = match a.format {
            Format::F32 | Format::Bf16 | Format::F16 | Format::Int8Row | Format::Fp8B128(_) => true,
            Format::E8Iq3 => a.cols.is_multiple_of(256),
            _ => a.cols.is_multiple_of(64),
        };
        if whole {
            assert!(bytes(&source, &a.weights) == bytes(&copy, &b.weights), "{}", spec.name);
        }
        if let (Some(a), Some(b)) = (a.scales, b.scales)
            && a.len > 4
        {
            assert!(bytes(&source, &a) == bytes(&copy, &b), "scales of {}", spec.name);
        }
    }
}

#[test]
fn a_flipped_byte_of_a_record_fails_its_expert_by_name_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let native = dir.path().join("native");
    converted(&root().join("models/hummingbird"), &native, Layout::R16k4);
    let model = Model::open(std::slice::from_ref(&native)).unwrap();
    let record = *model.expert_record(2, 5).unwrap();
    let path = model.shards.path(record.file).to_owned();
    let good = std::fs::read(&path).unwrap();
    for io in [IoMode::Buffered, IoMode::Direct, IoMode::Mmap] {
        for at in [record.offset, record.offset + 100, record.offset + record.len - 1] {
            let mut bad = good.clone();
            bad[at as usize] ^= 1;
            std::fs::write(&path, &bad).unwrap();
            let mut options = options(&native, Activations::Int8);
            options.io = Some(io);
            let engine = Engine::open(&options, &mut |_, _| {}).unwrap();
            let mut session = engine.session().unwrap();
            let tokens: Vec<u32> = (0..200).map(|i| (i * 7919 + 11) % 6144).collect();
            let mut each = |_: &[f32]| Ok(());
            let fed = engine.prefill(&mut session, &tokens, Want::Last, &mut each, &mut |_| true);
            let error = fed.unwrap_err().to_string();
            assert!(error.contains("layer 2") && error.contains("expert 5"), "{error}");
            assert!(error.contains("CRC-32C"), "{error}");
        }
    }
}

#[test]
fn a_table_of_records_that_is_not_true_is_refused_when_the_model_is_opened() {
    let dir = tempfile::tempdir().unwrap();
    let native = dir.path().join("native");
    converted(&root().join("fixtures/oracle/glm-int4-g64"), &native, Layout::R16k4);
    let path = native.join("model.safetensors");
    let good = std::fs::read(&path).unwrap();
    let open = || Model::open(std::slice::from_ref(&native));
    let model = open().unwrap();
    let record = *model.expert_record(1, 2).unwrap();
    let start = model.shards.files()[0].data_start;
    let row = format!("\\\"1.2\\\":[{},{},\\\"", record.offset - start, record.len);
    let at = good.windows(row.len()).position(|bytes| bytes == row.as_bytes()).unwrap();
    let digits = |number: u64| number.to_string().len();
    let offset_at = at + "\\\"1.2\\\":[".len();
    let len_at = offset_at + digits(record.offset - start) + 1;
    let hash_at = at + row.len();
    // What is changed to what, and a word of the answer.
    let cases: [(usize, u8, &str); 6] = [
        (at + 2, b'x', "layer.expert"),
        // Two rows of one expert.
        (at + 4, b'1', "written twice"),
        (offset_at + digits(record.offset - start) - 1, b'1', "multiples of 4096"),
        (offset_at, b'9', "beyond"),
        (len_at, b'2', "record of layer 1, expert 2"),
        (hash_at, b'g', "hexadecimal"),
    ];
    for (at, byte, needle) in cases {
        let mut bad = good.clone();
        assert_ne!(bad[at], byte);
        bad[at] = byte;
        std::fs::write(&path, &bad).unwrap();
        let error = open().unwrap_err().to_string();
        assert!(error.contains("model.safetensors"), "{error}");
        assert!(error.contains(needle), "{needle}: {error}");
    }
    // A record that lies at another expert's place.
    let other = model.expert_record(1, 1).unwrap().offset - start;
    let (own, other) = (record.offset - start, other);
    assert_eq!(digits(own), digits(other), "choose experts whose offsets are as long");
    let mut bad = good.clone();
    bad[offset_at..offset_at + digits(own)].copy_from_slice(other.to_string().as_bytes());
    std::fs::write(&path, &bad).unwrap();
    let error = open().unwrap_err().to_string();
    assert!(error.contains("record of layer 1, expert 2"), "{error}");
}
