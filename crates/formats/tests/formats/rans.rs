//! Coded matrices: round trips at every level, damaged streams, and sizes against the entropy.

use formats::rans::{self, Workspace};
use formats::{CodedFault, Format, FormatError, MatrixDesc};
use numerics::Isa;
use proptest::prelude::*;

use crate::support::{encode, noise};

const FORMATS: [Format; 5] = [
    Format::Int4Row,
    Format::Int4Grouped(16),
    Format::Int4Grouped(48),
    Format::Int4Grouped(64),
    Format::Int4Grouped(256),
];
/// Bytes that a stream may be longer than its image.
const LONGER_MAX: usize = 64;
/// Bytes of a matrix from which on the coder has 64 states.
const LARGE: usize = 1 << 18;

/// Evenly distributed numbers.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 16
    }
}

fn desc(format: Format, rows: usize, cols: usize) -> MatrixDesc {
    MatrixDesc::for_matmul(format, rows, cols, true).unwrap()
}

/// Whether each 64 bytes of a matrix are scales, in order.
fn scale_chunks(desc: &MatrixDesc) -> Vec<bool> {
    let group = desc.format().group().unwrap_or(desc.cols());
    let mut out = Vec::new();
    for _ in 0..desc.rows().div_ceil(16) {
        for start in (0..desc.cols()).step_by(group) {
            let inputs = group.min(desc.cols() - start);
            out.push(true);
            out.extend(vec![false; inputs.div_ceil(16) * 2]);
        }
    }
    assert_eq!(out.len() * 64, desc.bytes());
    out
}

/// The bytes of a matrix from its codes and scales, one by one.
fn image(
    desc: &MatrixDesc,
    mut code: impl FnMut() -> u8,
    mut scale: impl FnMut() -> u32,
) -> Vec<u8> {
    let mut out = Vec::new();
    for is_scale in scale_chunks(desc) {
        if is_scale {
            out.extend((0..16).flat_map(|_| scale().to_le_bytes()));
        } else {
            out.extend((0..64).map(|_| code() | code() << 4));
        }
    }
    out
}

/// Codes of which 8 is by far the most frequent.
fn skewed(random: &mut Random) -> u8 {
    8 + (random.next() & random.next() & random.next() & 7) as u8
}

/// A matrix of trained look, encoded.
fn trained(format: Format, rows: usize, cols: usize) -> (MatrixDesc, Vec<u8>) {
    let encoded = encode(format, &noise(rows * cols, 5), cols);
    let desc = desc(format, rows, cols);
    let mut image = vec![0; desc.bytes()];
    desc.store(0..rows, &encoded.weights, &encoded.scales, &mut image).unwrap();
    (desc, image)
}

/// Codes, decodes at every level, and returns the stream.
fn round_trip(desc: &MatrixDesc, image: &[u8], workspace: &mut Workspace) -> Vec<u8> {
    let stream = rans::encode(desc, image).unwrap();
    assert!(stream.len() <= image.len() + LONGER_MAX, "{desc:?}: {} bytes", stream.len());
    for isa in Isa::available() {
        let mut out = vec![0xa5; image.len()];
        rans::decode(isa, desc, &stream, &mut out, workspace).unwrap();
        assert!(out == image, "{desc:?} at {isa:?}");
    }
    stream
}

/// The result at every level, which must be one.
fn outcome(
    desc: &MatrixDesc,
    stream: &[u8],
    workspace: &mut Workspace,
) -> Result<Vec<u8>, FormatError> {
    let mut results = Isa::available().map(|isa| {
        let mut out = vec![0; desc.bytes()];
        rans::decode(isa, desc, stream, &mut out, workspace).map(|()| out)
    });
    let first = results.next().unwrap();
    for other in results {
        assert!(first == other, "levels differ");
    }
    first
}

fn fault(desc: &MatrixDesc, stream: &[u8], workspace: &mut Workspace) -> Option<CodedFault> {
    match outcome(desc, stream, workspace) {
        Ok(_) => None,
        Err(FormatError::Coded { fault, .. }) => Some(fault),
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn images_of_all_shapes_come_back() {
    let mut workspace = Workspace::default();
    let mut random = Random(1);
    for format in FORMATS {
        for rows in [1, 15, 16, 17, 100] {
            for cols in [16, 48, 64, 100, 640] {
                let (trained_desc, trained) = trained(format, rows, cols);
                round_trip(&trained_desc, &trained, &mut workspace);
                let desc = desc(format, rows, cols);
                let scale = 0x3d00_0000;
                let mut check = |image: Vec<u8>| {
                    round_trip(&desc, &image, &mut workspace);
                };
                check(vec![0; desc.bytes()]);
                check(vec![0xff; desc.bytes()]);
                check(image(&desc, || 8, || scale));
                check(image(&desc, || skewed(&mut random), || scale));
                check(image(&desc, || (random.next() & 15) as u8, || scale + 0x4_0000));
                let (mut codes, mut scales) = (Random(2), Random(3));
                check(image(&desc, || skewed(&mut codes), || scales.next() as u32));
                check((0..desc.bytes()).map(|_| random.next() as u8).collect());
            }
        }
    }
}

#[test]
fn a_matrix_without_rows_comes_back() {
    for format in FORMATS {
        let desc = desc(format, 0, 64);
        assert_eq!(round_trip(&desc, &[], &mut Workspace::default()), [0, 32]);
        assert_eq!(rans::entropy(&desc, &[]).scales_bytes, 0.0);
    }
}

#[test]
fn large_images_come_back() {
    let mut workspace = Workspace::default();
    let mut random = Random(4);
    for format in [Format::Int4Row, Format::Int4Grouped(64)] {
        let (desc, trained) = trained(format, 500, 1500);
        assert!(desc.bytes() > LARGE);
        let stream = round_trip(&desc, &trained, &mut workspace);
        assert_eq!(stream[0], 4, "vectors of states");
        let ones = image(&desc, || 8, || 0x3d00_0000);
        assert!(round_trip(&desc, &ones, &mut workspace).len() < ones.len() / 500);
        let random = image(&desc, || (random.next() & 15) as u8, || 0x3d00_0000);
        round_trip(&desc, &random, &mut workspace);
    }
}

#[test]
fn scales_of_all_kinds_come_back() {
    let mut workspace = Workspace::default();
    let desc = desc(Format::Int4Grouped(64), 100, 1000);
    let not_numbers = [0x7fc0_0001, 0xffc1_2345, 0x7f80_0000, 0xff80_0000, 0x8000_0000, 1];
    let scales: [(&str, &dyn Fn(u64) -> u32); 9] = [
        ("zeros", &|_| 0),
        ("ones", &|_| u32::MAX),
        ("not numbers", &|r| not_numbers[r as usize % 6]),
        ("any bits", &|r| r as u32),
        ("bf16 over 7", &|r| {
            (f32::from_bits(0x3c00_0000 | (r as u32 & 0xff) << 16) / 7.0).to_bits()
        }),
        ("few high bits", &|r| 0xffff_0000 | r as u32),
        ("few low bits", &|r| r as u32 & 0xff),
        ("two values", &|r| if r % 1000 == 0 { u32::MAX } else { 0 }),
        ("too many values", &|r| 0x3d00_0000 + (r % 3000) as u32 * 0x1001),
    ];
    for (name, scale) in scales {
        let (mut codes, mut random) = (Random(7), Random(8));
        let image = image(&desc, || skewed(&mut codes), || scale(random.next()));
        let stream = round_trip(&desc, &image, &mut workspace);
        assert_eq!(stream[1] == 32, name == "any bits", "{name}: whether scales are plain");
    }
}

/// 63 of every 64 codes are 8: all parts are coded, even in a matrix this small.
fn small() -> (MatrixDesc, Vec<u8>) {
    let desc = desc(Format::Int4Grouped(64), 17, 100);
    let (mut codes, mut scales) = (Random(9), Random(10));
    let scale = || 0x3d00_0000 | scales.next() as u32 & 0x000f_f000;
    let image = image(&desc, || 8 + u8::from(codes.next() % 64 == 0), scale);
    (desc, image)
}

#[test]
fn every_cut_of_a_stream_is_refused() {
    let mut workspace = Workspace::default();
    let (desc, image) = small();
    let stream = round_trip(&desc, &image, &mut workspace);
    assert!(stream[0] == 2 && stream[1] < 32 && stream.len() < image.len() / 2);
    for len in 0..stream.len() {
        let result = outcome(&desc, &stream[..len], &mut workspace);
        let Err(FormatError::Coded { .. }) = result else { panic!("{len} bytes: {result:?}") };
    }
    for more in [&[0u8][..], &[0, 0], &[1, 2, 3, 4]] {
        let longer = [&stream, more].concat();
        assert_eq!(fault(&desc, &longer, &mut workspace), Some(CodedFault::Trailing));
    }
}

#[test]
fn every_changed_byte_gives_one_result_at_every_level() {
    let mut workspace = Workspace::default();
    let (desc, image) = small();
    let mut stream = rans::encode(&desc, &image).unwrap();
    let (mut refused, mut accepted, mut final_states) = (0, 0, 0);
    for at in 0..stream.len() {
        for change in 1..=255 {
            stream[at] ^= change;
            match fault(&desc, &stream, &mut workspace) {
                Some(CodedFault::FinalState) => final_states += 1,
                Some(_) => refused += 1,
                None => accepted += 1,
            }
            stream[at] ^= change;
        }
    }
    // Values and plain bits of scales change without notice.
    assert!(refused + final_states > accepted && final_states > 0, "{accepted} accepted");
}

#[test]
fn damage_to_large_streams_gives_one_result_at_every_level() {
    let mut workspace = Workspace::default();
    let mut random = Random(11);
    let (desc, image) = trained(Format::Int4Grouped(64), 512, 1024);
    let mut stream = rans::encode(&desc, &image).unwrap();
    let words = stream.len() / 2..stream.len();
    for _ in 0..40 {
        let at = words.start + random.next() as usize % words.len();
        let change = 1 + (random.next() % 255) as u8;
        stream[at] ^= change;
        assert!(fault(&desc, &stream, &mut workspace).is_some(), "a changed word at {at}");
        stream[at] ^= change;
        assert!(fault(&desc, &stream[..at], &mut workspace).is_some());
    }
    for at in 0..600 {
        let change = 1 + (random.next() % 255) as u8;
        stream[at] ^= change;
        let _ = outcome(&desc, &stream, &mut workspace);
        stream[at] ^= change;
    }
}

#[test]
fn faults_have_names() {
    let mut workspace = Workspace::default();
    let (desc, image) = small();
    let stream = rans::encode(&desc, &image).unwrap();
    let mut check = |at: usize, bytes: &[u8], want: CodedFault| {
        let mut damaged = stream.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(fault(&desc, &damaged, &mut workspace), Some(want), "byte {at}");
    };
    check(0, &[1], CodedFault::Mode(1));
    check(0, &[255], CodedFault::Mode(255));
    check(1, &[25], CodedFault::ScaleBits(25));
    check(1, &[33], CodedFault::ScaleBits(33));
    check(2, &[0, 0], CodedFault::ScaleTable);
    check(2, &[1, 16], CodedFault::ScaleTable);
    check(4, &[0xff; 6], CodedFault::ScaleTable);
    // Two values in the table, their numbers and shares in two bytes each at most.
    let stream = rans::encode(&desc, &vec![0; image.len()]).unwrap();
    assert_eq!(&stream[..9], &[2, 0, 2, 0, 0, 0xff, 0x1f, 1, 1]);
    let mut check = |at: usize, bytes: &[u8], want: CodedFault| {
        let mut damaged = stream.clone();
        damaged[at..at + bytes.len()].copy_from_slice(bytes);
        assert_eq!(fault(&desc, &damaged, &mut workspace), Some(want), "byte {at}");
    };
    check(7, &[0], CodedFault::ScaleTable);
    check(8, &[2], CodedFault::ScaleTable);
    check(9, &[0xfe], CodedFault::CodeTable);
    check(33, &[0; 4], CodedFault::State);
}

#[test]
fn other_formats_and_lengths_are_refused() {
    let mut workspace = Workspace::default();
    let isa = Isa::detect();
    let rows = MatrixDesc::for_rows(Format::Int4Row, 16, 64).unwrap();
    let others = [Format::F32, Format::Int8Row, Format::Int3G64, Format::E8Iq3, Format::Mxfp4];
    for desc in others.map(|format| desc(format, 16, 64)).into_iter().chain([rows]) {
        assert!(!rans::applies(&desc));
        let mut image = vec![0; desc.bytes()];
        assert_eq!(rans::encode(&desc, &image), None);
        assert_eq!(rans::entropy(&desc, &image).codes_bytes, 0.0);
        let result = rans::decode(isa, &desc, &[0, 32], &mut image, &mut workspace);
        let Err(FormatError::Coded { fault: CodedFault::NotCoded, .. }) = result else {
            panic!("{desc:?}: {result:?}");
        };
    }
    let (desc, mut image) = small();
    assert!(rans::applies(&desc));
    let stream = rans::encode(&desc, &image).unwrap();
    image.pop();
    let result = rans::decode(isa, &desc, &stream, &mut image, &mut workspace);
    assert!(matches!(result, Err(FormatError::Length { what: "the image", .. })));
}

#[test]
fn sizes_are_those_that_the_entropy_predicts() {
    let mut workspace = Workspace::default();
    let mut check = |what: &str, desc: &MatrixDesc, image: &[u8]| {
        let entropy = rans::entropy(desc, image);
        let predicted = entropy.codes_bytes + entropy.scales_bytes;
        let coded = round_trip(desc, image, &mut workspace).len() as f64;
        assert!(coded > predicted * 0.999, "{what}: {coded} bytes, {predicted} predicted");
        assert!(coded < predicted * 1.02, "{what}: {coded} bytes, {predicted} predicted");
        assert!(coded < image.len() as f64 * 0.97, "{what}: {coded} bytes of {}", image.len());
    };
    for (rows, cols) in [(128, 256), (256, 128), (300, 2000)] {
        for format in [Format::Int4Row, Format::Int4Grouped(32), Format::Int4Grouped(64)] {
            let (desc, image) = trained(format, rows, cols);
            check(&format!("{format} [{rows}, {cols}]"), &desc, &image);
        }
    }
    let desc = desc(Format::Int4Grouped(64), 512, 1024);
    for powers in 1..5 {
        let (mut codes, mut scales) = (Random(12), Random(13));
        // The larger `powers`, the rarer are large codes.
        let code = || (0..powers).fold(15, |code, _| code & codes.next() as u8);
        let scale = || 0x3d00_0000 | scales.next() as u32 & 0x003f_ffff;
        check(&format!("{powers} powers"), &desc, &image(&desc, code, scale));
    }
}

proptest! {
    #[test]
    fn any_stream_gives_one_result_at_every_level(
        head in proptest::sample::select(vec![vec![0, 32], vec![2, 32], vec![4, 0], vec![]]),
        stream in proptest::collection::vec(any::<u8>(), 0..1500),
    ) {
        let stream = [head, stream].concat();
        let _ = outcome(&desc(Format::Int4Grouped(64), 16, 64), &stream, &mut Workspace::default());
    }
}
