//! Headers: every cut, every kind of impossible number, and agreement with the reference reader.

use container::header::{HeaderError, MAX_HEADER_BYTES, header_len, parse_prefix};
use proptest::prelude::*;

use crate::common::*;

fn parse(bytes: &[u8]) -> Result<container::header::Header, HeaderError> {
    parse_prefix(bytes, bytes.len() as u64)
}

fn sample() -> Vec<u8> {
    file_bytes(
        &[
            zeros("a.weight", "F32", &[2, 3]),
            zeros("__pad__.0", "U8", &[40]),
            zeros("b", "BF16", &[5]),
        ],
        &[("format", "pt")],
    )
}

#[test]
fn a_good_file() {
    let bytes = sample();
    let header = parse(&bytes).unwrap();
    let names: Vec<&str> = header.tensors.iter().map(|t| &*t.name).collect();
    assert_eq!(names, ["a.weight", "b"]);
    assert_eq!(header.metadata, [("format".to_owned(), "pt".to_owned())]);
    assert_eq!(header.tensors[0].offset, header.data_start);
    assert_eq!(header.tensors[1].offset, header.data_start + 24 + 40);
    assert_eq!(header.tensors[1].len, 10);
}

#[test]
fn every_cut_is_a_named_error() {
    let bytes = sample();
    let data_start = parse(&bytes).unwrap().data_start as usize;
    for cut in 0..bytes.len() {
        let error = parse(&bytes[..cut]).unwrap_err();
        match error {
            HeaderError::TooShort { .. } => assert!(cut < 8),
            HeaderError::HeaderCut { wanted_bytes, file_bytes } => {
                assert!(cut >= 8 && cut < data_start);
                assert_eq!((wanted_bytes, file_bytes), (data_start as u64, cut as u64));
            }
            HeaderError::Truncated { wanted_bytes, file_bytes, ref name } => {
                assert!(cut >= data_start);
                assert_eq!((wanted_bytes, file_bytes), (bytes.len() as u64, cut as u64));
                assert!(!name.is_empty());
            }
            other => panic!("cut {cut}: {other}"),
        }
    }
    let mut longer = bytes;
    longer.push(0);
    assert!(matches!(parse(&longer), Err(HeaderError::TooLong { .. })));
}

/// The JSON cut at every byte, with a length field that agrees.
#[test]
fn every_cut_of_the_json() {
    let bytes = sample();
    let json = std::str::from_utf8(&bytes[8..parse(&bytes).unwrap().data_start as usize]).unwrap();
    for cut in 0..json.len() {
        let error = parse(&raw_file(&json[..cut], &[0; 74])).unwrap_err();
        assert!(matches!(error, HeaderError::Json { .. }), "{cut}: {error}");
        assert!(error.to_string().contains("column"), "{error}");
    }
}

fn one(shape: &str, dtype: &str, begin: &str, end: &str, data: usize) -> HeaderError {
    let header =
        format!(r#"{{"t":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[{begin},{end}]}}}}"#);
    parse(&raw_file(&header, &vec![0; data])).unwrap_err()
}

#[test]
fn impossible_numbers() {
    let max = u64::MAX.to_string();
    let cases = [
        one("[4]", "U8", "4", "0", 4),
        one("[4]", "F32", "0", "4", 4),
        one("[4]", "U8", "0", &max, 4),
        one("[18446744073709551615]", "U8", "0", &max, 4),
        one(&format!("[{max},{max}]"), "U8", "0", "4", 4),
        one(&format!("[0,{max},{max}]"), "U8", "0", "0", 0),
        one("[2305843009213693952]", "F64", "0", "0", 0),
        one("[1,1,1,1,1,1,1,1,1]", "U8", "0", "1", 1),
        one("[-1]", "U8", "0", "4", 4),
        one("[1.5]", "U8", "0", "4", 4),
        one("[1]", "U9", "0", "1", 1),
        one("[1]", "F4", "0", "1", 1),
        one("[3]", "F4", "0", "2", 2),
        one("4", "U8", "0", "4", 4),
        one("[4]", "U8", "1", "5", 5),
        one("[18446744073709551616]", "U8", "0", "4", 4),
    ];
    for error in cases {
        assert!(!error.to_string().is_empty());
    }
    assert!(matches!(one("[4]", "U8", "1", "5", 5), HeaderError::Hole { .. }));
    assert!(matches!(
        one("[4]", "F32", "0", "4", 4),
        HeaderError::WrongSize { wanted_bytes: 16, .. }
    ));
}

#[test]
fn overlaps_and_duplicates() {
    let two = |a: &str, ao: &str, b: &str, bo: &str| {
        let header = format!(
            r#"{{"{a}":{{"dtype":"U8","shape":[4],"data_offsets":{ao}}},"{b}":{{"dtype":"U8","shape":[4],"data_offsets":{bo}}}}}"#
        );
        parse(&raw_file(&header, &[0; 8]))
    };
    assert!(two("a", "[0,4]", "b", "[4,8]").is_ok());
    assert!(two("a", "[4,8]", "b", "[0,4]").is_ok());
    for offsets in ["[0,4]", "[3,7]", "[2,6]"] {
        let error = two("a", "[0,4]", "b", offsets).unwrap_err();
        assert!(matches!(error, HeaderError::Overlap { .. }), "{error}");
        assert!(error.to_string().contains("a and b"), "{error}");
    }
    // A plain map would keep the second one silently.
    let error = two("a", "[0,4]", "a", "[4,8]").unwrap_err();
    assert_eq!(error, HeaderError::Duplicate { name: "a".to_owned() });
    let error = two("a", "[0,4]", "\\u0061", "[4,8]").unwrap_err();
    assert_eq!(error, HeaderError::Duplicate { name: "a".to_owned() });
    // Padding may repeat, but not overlap.
    assert!(two("__pad__.0", "[0,4]", "__pad__.0", "[4,8]").unwrap().tensors.is_empty());
    assert!(two("__pad__.0", "[0,4]", "__pad__.0", "[2,6]").is_err());
}

#[test]
fn other_shapes_of_json() {
    for text in [
        "",
        "null",
        "[]",
        "1",
        "\"x\"",
        "{\"a\":1}",
        "{\"__metadata__\":1}",
        "{\"__metadata__\":{\"a\":1}}",
        "{\"__metadata__\":{},\"__metadata__\":{}}",
        "{\"__metadata__\":{\"a\":\"1\",\"a\":\"2\"}}",
        "{} x",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0]}}",
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[0,0,0]}}",
        "{\"a\":{\"shape\":[0],\"data_offsets\":[0,0]}}",
    ] {
        let error = parse(&raw_file(text, &[])).unwrap_err();
        assert!(matches!(error, HeaderError::Json { .. }), "{text}: {error}");
    }
    let deep = format!("{{\"a\":{}", "[".repeat(200_000));
    assert!(parse(&raw_file(&deep, &[])).is_err());
    assert!(parse(&raw_file("{}   \n", &[])).unwrap().tensors.is_empty());
    assert!(
        parse(&raw_file(
            "{\"a\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[0,4]}}",
            &[0; 4]
        ))
        .is_ok()
    );
}

#[test]
fn length_field() {
    for length in [MAX_HEADER_BYTES + 1, u64::MAX, 1 << 63, u64::MAX - 7] {
        let error = header_len(length.to_le_bytes(), u64::MAX).unwrap_err();
        assert!(matches!(error, HeaderError::HeaderTooLong { .. }), "{error}");
    }
    assert_eq!(header_len(5u64.to_le_bytes(), 13), Ok(5));
    assert!(header_len(6u64.to_le_bytes(), 13).is_err());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn arbitrary_bytes_never_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        let _ = parse(&bytes);
        let text = String::from_utf8_lossy(&bytes);
        let _ = parse(&raw_file(&text, &[0; 16]));
    }

    /// Near-valid headers: one byte of a good file changed.
    #[test]
    fn one_changed_byte_never_panics(at in 0usize..300, byte in any::<u8>()) {
        let mut bytes = sample();
        let at = at % bytes.len();
        bytes[at] = byte;
        agree(&bytes);
    }

    /// Random small numbers in the right grammar.
    #[test]
    fn agrees_with_the_reference_reader(
        tensors in prop::collection::vec(
            (0u8..4, prop::collection::vec(0u64..5, 0..4), 0u64..40, 0u64..40), 0..4),
        data in 0usize..40,
    ) {
        let entries: Vec<String> = tensors
            .iter()
            .enumerate()
            .map(|(i, (dtype, shape, begin, end))| {
                let dtype = ["U8", "F32", "BF16", "F4"][usize::from(*dtype)];
                format!(r#""t{i}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#)
            })
            .collect();
        agree(&raw_file(&format!("{{{}}}", entries.join(",")), &vec![0; data]));
    }
}

/// Whatever this reader accepts, the reference reader accepts with the same places.
fn agree(bytes: &[u8]) {
    let (ours, theirs) = (parse(bytes), safetensors::SafeTensors::deserialize(bytes));
    match (ours, theirs) {
        (Ok(header), Ok(reference)) => {
            for tensor in &header.tensors {
                let view = reference.tensor(&tensor.name).unwrap();
                let from = tensor.offset as usize;
                assert_eq!(view.data().as_ptr(), bytes[from..].as_ptr());
                assert_eq!(view.data().len() as u64, tensor.len);
                assert_eq!(view.shape(), tensor.shape);
            }
        }
        (Ok(_), Err(error)) => panic!("only this reader accepts: {error:?}"),
        // The reference keeps the last of two equal names; the other limits are ours too.
        (Err(_), _) => {}
    }
}

/// The fuzzer starts from files that are models, so that it gets past the header.
#[test]
fn the_seeds_of_the_fuzzer_are_models() {
    let seeds =
        std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/seeds/container_header");
    let config = with(
        OLMOE,
        serde_json::json!({"vocab_size": 4, "hidden_size": 4, "intermediate_size": 2,
            "num_hidden_layers": 1, "num_attention_heads": 2, "num_experts": 2,
            "num_experts_per_tok": 1}),
    );
    for name in ["plain", "int4", "fused"] {
        let bytes = std::fs::read(seeds.join(name)).unwrap();
        let file = (name.into(), parse(&bytes).unwrap(), bytes.len() as u64);
        let shards = container::Shards::from_headers([file]).unwrap();
        let config = container::Config::from_json(&config, None).unwrap();
        let model = container::Model::from_parts(config, shards).unwrap();
        assert_eq!(model.report().unused.0, 0);
    }
}
