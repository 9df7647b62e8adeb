// Averages over several hosts. As on one host, an average is right if it fits its type, even if the sum does not.

#include <gtest/gtest.h>

#include <cstring>
#include <random>

#include "group/plan/reduction_split.h"
#include "kernel/reduce/float_bits.h"
#include "support/hosts.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using kernel::F16;
using kernel::F8E4M3FN;
using Values = std::vector<float>;

template <class T>
void put(std::byte* at, T element) {
  std::memcpy(at, &element, sizeof element);
}

std::vector<std::byte> bytes_of(DType dtype, const Values& values) {
  const size_t width = size_of(dtype);
  std::vector<std::byte> bytes(values.size() * width);
  for (size_t i = 0; i < values.size(); ++i) {
    std::byte* const at = bytes.data() + i * width;
    switch (dtype) {
      case DType::kF16: put(at, F16::round(values[i])); break;
      case DType::kF8E4M3FN: put(at, F8E4M3FN::round(values[i])); break;
      default: put(at, values[i]);
    }
  }
  return bytes;
}

struct Question {
  Collective collective;
  DType dtype;
};
void PrintTo(const Question& q, std::ostream* out) { *out << nvx::name(q.collective) << '_' << nvx::name(q.dtype); }

/// The results of the ranks that get one, where the input of rank r is inputs[r]. For reduce_scatter: that rank's
/// block.
std::vector<std::vector<std::byte>> averages(const std::vector<int>& host_of, const Question& q,
                                             const std::vector<Values>& inputs) {
  const size_t ranks = host_of.size(), width = size_of(q.dtype), bytes = inputs[0].size() * width;
  const bool scatters = q.collective == Collective::kReduceScatter;
  std::vector<std::vector<std::byte>> results(ranks);
  Hosts hosts(host_of);
  MemoryStore store;
  as_threads(int(ranks), [&](int rank) {
    Group group(store, hosts.options("average", rank));
    const std::vector<std::byte> in = bytes_of(q.dtype, inputs[size_t(rank)]);
    std::vector<std::byte>& out = results[size_t(rank)];
    out.resize(scatters ? bytes / ranks : bytes);
    Operation o;
    o.collective = q.collective, o.dtype = q.dtype, o.op = ReduceOp::kAvg;
    o.in = in.data(), o.out = out.data(), o.count = bytes / width;
    if (q.collective == Collective::kReduce) o.root = int(ranks) - 1;
    if (scatters) {
      o.send = Pieces(ranks);
      for (size_t r = 0; r < ranks; ++r) o.send[r] = {const_cast<std::byte*>(in.data()) + r * out.size(), out.size()};
    }
    ASSERT_TRUE(group.execute(o).ok());
    if (q.collective == Collective::kReduce && o.root != rank) out.clear();
    ASSERT_TRUE(barrier(group).ok());
  });
  return results;
}

class Averages : public testing::TestWithParam<Question> {
 protected:
  /// Compares averages over hosts of several shapes with those on one host.
  static void expect_those_of_one_host(const std::function<std::vector<Values>(size_t ranks, size_t count)>& inputs) {
    for (const std::vector<int>& host_of : {std::vector<int>{0, 1}, {0, 0, 1, 1}, {0, 1, 2}, {0, 0, 0, 1}}) {
      const size_t ranks = host_of.size();
      for (const size_t count : {ranks, 10'000 * ranks}) {
        const std::vector<Values> given = inputs(ranks, count);
        EXPECT_EQ(averages(host_of, GetParam(), given), averages(std::vector<int>(ranks), GetParam(), given))
            << ranks << " ranks on " << host_of.back() + 1 << " hosts, " << count << " elements";
      }
    }
  }
};
INSTANTIATE_TEST_SUITE_P(All, Averages,
                         testing::Values(Question{Collective::kAllReduce, DType::kF16},
                                         Question{Collective::kReduce, DType::kF16},
                                         Question{Collective::kReduceScatter, DType::kF16},
                                         Question{Collective::kAllReduce, DType::kF8E4M3FN},
                                         Question{Collective::kReduceScatter, DType::kF8E4M3FN},
                                         Question{Collective::kAllReduce, DType::kF32}),
                         [](const auto& question) { return testing::PrintToString(question.param); });

TEST_P(Averages, FitWhereSumsDoNot) {
  const float large = GetParam().dtype == DType::kF8E4M3FN ? 384.f : 40'000.f;
  expect_those_of_one_host(
      [&](size_t ranks, size_t count) { return std::vector<Values>(ranks, Values(count, large)); });
}

/// Scaling by a power of two before the sum is exact.
TEST_P(Averages, OfSmallWholeNumbersAreExact) {
  expect_those_of_one_host([](size_t ranks, size_t count) {
    std::minstd_rand random(7);
    std::vector<Values> inputs(ranks, Values(count));
    for (Values& values : inputs) {
      for (float& x : values) x = float(random() % 3) - 1;
    }
    return inputs;
  });
}

TEST(AveragesOfAnything, AreTheSameOnAllRanks) {
  std::minstd_rand random(7);
  std::vector<Values> inputs(5, Values(20'000));
  for (Values& values : inputs) {
    for (float& x : values) x = (float(random() % 2001) - 1000) * 65.f;
  }
  const auto results = averages({0, 0, 1, 1, 2}, {Collective::kAllReduce, DType::kF16}, inputs);
  for (const auto& result : results) EXPECT_EQ(result, results[0]);
}

/// Terms below the smallest normal number of the type must not vanish from the sum.
TEST(AveragesOfAnything, KeepWhatIsSmall) {
  const float small = 0x1p-20f;  // smallest normal number of f16: 2^-14; smallest subnormal: 2^-24
  const auto results = averages({0, 0, 1, 1}, {Collective::kAllReduce, DType::kF16}, std::vector<Values>(4, {small}));
  for (const auto& result : results) EXPECT_EQ(result, bytes_of(DType::kF16, {small}));
}

TEST(ReductionSplit, ScalesWhereSumsMayNotFit) {
  struct Case {
    DType dtype;
    ReduceOp op;
    size_t ranks;
    ReduceOp inside;
    double factor;
    ReduceOp between;
    double divisor;
  };
  constexpr auto kSum = ReduceOp::kSum, kAvg = ReduceOp::kAvg, kPremulSum = ReduceOp::kPremulSum, kMax = ReduceOp::kMax;
  const Case cases[] = {
      {DType::kF16, kSum, 4, kSum, 1, kSum, 1},
      {DType::kF16, kMax, 4, kMax, 1, kMax, 1},
      {DType::kF16, kPremulSum, 4, kPremulSum, 0.3, kSum, 1},
      {DType::kF16, kAvg, 4, kPremulSum, 1. / 4, kSum, 1},
      {DType::kF16, kAvg, 5, kPremulSum, 1. / 8, kSum, 5. / 8},
      {DType::kBF16, kAvg, 3, kPremulSum, 1. / 4, kSum, 3. / 4},
      {DType::kF8E4M3FN, kAvg, 16, kPremulSum, 1. / 16, kSum, 1},
      {DType::kF8E8M0FNU, kAvg, 2, kPremulSum, 1. / 2, kSum, 1},
      {DType::kF32, kAvg, 4, kSum, 1, kSum, 4},
      {DType::kC64, kAvg, 3, kSum, 1, kSum, 3},
      {DType::kI32, kAvg, 4, kSum, 1, kSum, 4},
      {DType::kI32, ReduceOp::kBxor, 4, ReduceOp::kBxor, 1, ReduceOp::kBxor, 1},
  };
  for (const Case& c : cases) {
    const ReductionSplit split = split_of(c.dtype, c.op, c.op == kPremulSum ? 0.3 : 1, c.ranks);
    EXPECT_EQ(split.inside, c.inside) << name(c.op) << " of " << name(c.dtype);
    EXPECT_EQ(split.factor, c.factor) << name(c.op) << " of " << name(c.dtype);
    EXPECT_EQ(split.between, c.between) << name(c.op) << " of " << name(c.dtype);
    EXPECT_EQ(split.divisor, c.divisor) << name(c.op) << " of " << name(c.dtype);
  }
}

}  // namespace
}  // namespace nvx::test
