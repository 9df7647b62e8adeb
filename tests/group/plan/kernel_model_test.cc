// The model of the kernels' time: its terms by hand, and its figures against those of a GPU.

#include "group/plan/kernel_model.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <map>
#include <sstream>
#include <string>
#include <vector>

#include "group/plan/device_plan.h"
#include "kernel/gpu/launch_cuda.h"
#include "support/results.h"
#include "support/sizes.h"

namespace nvx::test {
namespace {

using kernel::Collective;
using kernel::DeviceAlgorithm;
using kernel::DeviceShape;
using Kind = DeviceLink::Kind;

const DeviceLink kNvlink{Kind::kNvlink, 450, "NVLink"}, kOneGpu{Kind::kOneGpu, 1000, "one GPU"};

/// The all_reduces of the file's parts `product` and `bench`.
std::vector<std::map<std::string, std::string>> measured() {
  auto rows = rows_of_file(source_root() / "bench/results/gpu_h200.json");
  std::erase_if(rows, [](auto& row) {
    return !row.contains("graph_us") || row.contains("without") ||
           (row["product"] != "all_reduce" && row["bench"] != "all_reduce");
  });
  return rows;
}

TEST(KernelModel, IsNearWhatAGpuHasShown) {
  std::vector<double> factors;
  std::string worst;
  for (auto& row : measured()) {
    const auto number = [&](const char* name) { return uint32_t(std::stoul(row[name])); };
    const DeviceShape shape{number("ranks"), number("blocks"), number("packets"), number("chunk_bytes")};
    const DeviceAlgorithm algorithm = row["algorithm"] == "chunks"     ? DeviceAlgorithm::kReduceChunks
                                      : row["algorithm"] == "two_shot" ? DeviceAlgorithm::kReducePacketsTwoShot
                                                                       : DeviceAlgorithm::kReducePackets;
    // These kernels loaded one pack of each peer at once.
    const KernelCost cost = cost_of(algorithm, Collective::kAllReduce, number("bytes"), shape, kOneGpu,
                                    std::min(shape.ranks - 1, kLoadsAtOnce));
    // They also read a word of the host first: see the rows without "reads of host memory".
    const double took = std::stod(row["graph_us"]) - 0.3, predicted = cost.seconds * 1e6;
    factors.push_back(std::max(predicted / took, took / predicted));
    if (factors.back() >= *std::max_element(factors.begin(), factors.end()))
      worst = row["algorithm"] + " of " + row["bytes"] + " bytes, " + row["ranks"] + " ranks x " + row["blocks"] +
              " blocks: " + row["graph_us"] + " us, the model says " + std::to_string(predicted);
  }
  ASSERT_GT(factors.size(), 400u);
  std::sort(factors.begin(), factors.end());
  EXPECT_LT(factors.back(), 1.6) << worst;
  EXPECT_LT(factors[factors.size() * 9 / 10], 1.25);
  EXPECT_LT(factors[factors.size() / 2], 1.08);
}

/// The table of docs/gpu-model.md.
std::string predicted() {
  std::string table =
      "| all_reduce of | ranks | algorithm | rounds, fences | in flight, a block | time | bus bandwidth |\n"
      "|---|---|---|---|---|---|---|\n";
  const struct {
    size_t ranks;
    std::vector<size_t> sizes;
  } kRows[] = {
      {8, {8, 16 * K, 256 * K, 1 * M, 16 * M, 64 * M, 1024 * M}}, {4, {1 * M, 1024 * M}}, {2, {1 * M, 1024 * M}}};
  for (const auto& [ranks, sizes] : kRows) {
    for (const size_t bytes : sizes) {
      const DeviceShape shape = shape_for({.ranks = ranks, .world = ranks}, GpuLink::kNvlink);
      const DeviceAlgorithm algorithm = plan(Collective::kAllReduce, bytes, {shape}).algorithm;
      const KernelCost cost = cost_of(algorithm, Collective::kAllReduce, bytes, shape, kNvlink);
      const double bus = 2 * double(ranks - 1) / double(ranks) * double(bytes) / cost.seconds / 1e9;
      const std::string size = bytes < K   ? std::to_string(bytes) + " B"
                               : bytes < M ? std::to_string(bytes / K) + " KiB"
                                           : std::to_string(bytes / M) + " MiB";
      char row[200];
      std::snprintf(row, sizeof row, "| %s | %zu | `%s` | %zu | %.1f KiB | %.1f us | %.*f GB/s |\n", size.c_str(),
                    ranks, name(algorithm), size_t(cost.rounds), double(cost.in_flight) / K, cost.seconds * 1e6,
                    bus < 10 ? 1 : 0, bus);
      table += row;
    }
  }
  return table;
}

TEST(KernelModel, IsTheTableOfItsPage) {
  std::ifstream in(source_root() / "docs" / "gpu-model.md");
  const std::string page((std::istreambuf_iterator<char>(in)), {});
  const std::string table = predicted();
  EXPECT_NE(page.find("compares -->\n" + table + "<!-- end"), std::string::npos) << "the table should be\n" << table;
}

TEST(KernelModel, MeetsTheTargetOfBulk) {
  const DeviceShape shape = shape_for({.ranks = 8, .world = 8}, GpuLink::kNvlink);
  EXPECT_GE(cost_of(DeviceAlgorithm::kReduceChunks, Collective::kAllReduce, 1024 * M, shape, kNvlink).gb_s, 330);
}

/// The default table, by link and ranks, against the model that it follows from: no other algorithm whose packets hold
/// the message is much faster. The table has one row for several numbers of ranks.
TEST(KernelModel, AgreesWithTheTableOfEachLink) {
  for (const DeviceLink& link : {kNvlink, DeviceLink{Kind::kPcie, 31.5, "PCIe 4.0 x16"}}) {
    for (const size_t ranks : {2, 3, 4, 6, 8, 16}) {
      const DeviceShape shape = shape_for({.ranks = ranks, .world = ranks}, link.kind);
      const DevicePlanFacts facts{.shape = shape, .link = link.kind};
      for (const Collective c : {Collective::kAllReduce, Collective::kReduceScatter, Collective::kAllGather}) {
        const size_t pieces = c == Collective::kReduceScatter ? ranks : 1;
        for (size_t bytes = 64; bytes <= 64 * M; bytes *= 2) {
          const auto cost = [&](DeviceAlgorithm algorithm) {
            return cost_of(algorithm, c, bytes * pieces, shape, link).seconds;
          };
          const DeviceAlgorithm chosen = plan(c, bytes, facts).algorithm;
          for (const DeviceAlgorithm other : algorithms_of(c)) {
            if (bytes > most_bytes(other, shape)) continue;
            EXPECT_LT(cost(chosen), 1.15 * cost(other))
                << name(link.kind) << ", " << ranks << " ranks, " << name(c) << " of " << bytes << ": " << name(chosen)
                << ", not " << name(other);
          }
        }
      }
    }
  }
}

/// The fewest blocks that the model wants for bulk, and not many more: a block takes an SM from the computation.
TEST(KernelModel, GivesTheBlocksOfEachLink) {
  const auto rate = [](size_t ranks, const DeviceLink& link, uint32_t blocks) {
    return cost_of(DeviceAlgorithm::kReduceChunks, Collective::kAllReduce, 1024 * M,
                   device_shape(uint32_t(ranks), blocks, pad_budget(64 * M)), link)
               .gb_s *
           1e9 / usable(link, ranks);
  };
  const DeviceLink kPcie4{Kind::kPcie, 31.5, ""}, kPcie5{Kind::kPcie, 63, ""};
  for (const size_t ranks : {2, 4, 8, 16}) {
    const auto blocks = uint32_t(Tuning().of(Tune::kBlocks, ranks, GpuLink::kPcie));
    EXPECT_GT(rate(ranks, kPcie5, blocks), 0.98) << ranks;
    EXPECT_GT(rate(ranks, kPcie4, blocks / 2), 0.98) << ranks;
    EXPECT_LT(rate(ranks, kPcie5, 2), 0.98) << ranks;
    EXPECT_LT(rate(ranks, kNvlink, blocks), 0.75) << ranks << ": NVLink wants more";
  }
}

/// The default table inside a GPU against the GPU that was measured, with channels that a group could have.
TEST(KernelModel, InsideAGpuTheTableIsThatOfTheMeasuredOnes) {
  std::map<std::string, std::map<std::string, double>> by_case;  // by algorithm
  for (auto& row : measured()) {
    if (row["product"] != "all_reduce") continue;
    by_case[row["ranks"] + " " + row["blocks"] + " " + row["packets"] + " " + row["chunk_bytes"] + " " + row["bytes"]]
           [row["algorithm"]] = std::stod(row["graph_us"]);
  }
  size_t compared = 0;
  for (const auto& [text, times] : by_case) {
    DeviceShape shape;
    size_t bytes = 0;
    std::istringstream(text) >> shape.ranks >> shape.blocks >> shape.packets >> shape.chunk_bytes >> bytes;
    const DeviceAlgorithm algorithm =
        plan(Collective::kAllReduce, bytes, {.shape = shape, .link = GpuLink::kOneGpu}).algorithm;
    const auto chosen = times.find(algorithm == DeviceAlgorithm::kReduceChunks           ? "chunks"
                                   : algorithm == DeviceAlgorithm::kReducePacketsTwoShot ? "two_shot"
                                                                                         : "one_shot");
    ASSERT_NE(chosen, times.end()) << text;
    for (const auto& [other, time] : times) {
      EXPECT_LT(chosen->second, 1.2 * time) << text << ": " << other;
      compared += other != chosen->first;
    }
  }
  EXPECT_GT(compared, 90u);
}

/// The table of docs/gpu-model.md about blocks: medians of one-shot all_reduces in all channels of the file.
std::string by_blocks() {
  std::string table =
      "| one-shot all_reduce of | ranks | 1 block | 2 | 4 | 8 | 16 | 24 | 32 | saved at most |\n"
      "|---|---|---|---|---|---|---|---|---|---|\n";
  std::map<std::string, double> times;
  for (auto& row : measured()) {
    if (row["algorithm"] == "one_shot")
      times[row["ranks"] + " " + row["bytes"] + " " + row["blocks"]] = std::stod(row["graph_us"]);
  }
  for (const char* bytes : {"8", "1024", "16384"}) {
    for (const char* ranks : {"2", "4", "8"}) {
      const size_t size = std::stoul(bytes);
      std::string line =
          "| " + (size < K ? std::to_string(size) + " B" : std::to_string(size / K) + " KiB") + " | " + ranks;
      double least = 1e9, as_bulk = 0;
      for (const uint32_t blocks : {1, 2, 4, 8, 16, 24, 32}) {
        const auto time = times.find(std::string(ranks) + " " + bytes + " " + std::to_string(blocks));
        char cell[32] = " | -";
        if (time != times.end()) {
          std::snprintf(cell, sizeof cell, blocks == 1 ? " | %.2f us" : " | %.2f", time->second);
          least = std::min(least, time->second);
          if (blocks >= 16) as_bulk = std::max(as_bulk, time->second);
        }
        line += cell;
      }
      char saved[32];
      std::snprintf(saved, sizeof saved, " | %.2f us |\n", as_bulk - least);
      table += line + saved;
    }
  }
  return table;
}

TEST(KernelModel, BlocksAreTheOtherTableOfItsPage) {
  std::ifstream in(source_root() / "docs" / "gpu-model.md");
  const std::string page((std::istreambuf_iterator<char>(in)), {});
  const std::string table = by_blocks();
  EXPECT_NE(page.find("compares this too -->\n" + table + "<!-- end"), std::string::npos) << "the table should be\n"
                                                                                          << table;
}

TEST(KernelModel, CountsRoundsAndBytesInFlight) {
  const DeviceShape shape{8, 16, 1024, 16 * K};
  const auto cost = [&](DeviceAlgorithm algorithm, Collective collective, size_t bytes, size_t ranks = 8) {
    DeviceShape of = shape;
    of.ranks = uint32_t(ranks);
    return cost_of(algorithm, collective, bytes, of, kNvlink);
  };
  const auto chunks = DeviceAlgorithm::kReduceChunks;
  const KernelCost large = cost(chunks, Collective::kAllReduce, 64 * M);  // 512 KiB for each block and slice
  EXPECT_EQ(large.rounds, 512 / 16 + 2u);
  EXPECT_EQ(large.waits, large.rounds + 1) << "one more for the arrivals";
  EXPECT_EQ(large.sent, 2 * 7 * 8 * M);
  EXPECT_EQ(large.in_flight, 7 * kernel::kLanes * sizeof(kernel::Pack));
  EXPECT_EQ(cost(chunks, Collective::kAllReduce, 64 * M + 16).rounds, large.rounds + 1);
  EXPECT_EQ(cost(chunks, Collective::kReduceScatter, 64 * M).rounds, large.rounds - 1);
  EXPECT_EQ(cost(chunks, Collective::kAllReduce, 64 * K).in_flight, 7 * 512u) << "all that a block has";
  EXPECT_EQ(cost(DeviceAlgorithm::kExchangeChunks, Collective::kAllGather, 8 * M).rounds, 512 / 16 + 1u);
  EXPECT_EQ(cost(DeviceAlgorithm::kExchangeChunks, Collective::kAllToAll, 64 * M).rounds, 512 / 16 + 1u);
  const KernelCost small = cost(DeviceAlgorithm::kReducePackets, Collective::kAllReduce, 8);
  EXPECT_EQ(small.rounds, 0u);
  EXPECT_EQ(small.waits, 1u);
  EXPECT_EQ(cost(chunks, Collective::kAllReduce, 64 * M, 1).seconds, 0);
}

TEST(KernelModel, IsLimitedByTheLinkOrByTheBlocks) {
  const auto rate = [](uint32_t blocks, const DeviceLink& link, uint32_t loads = kLoadsAtOnce, uint32_t ranks = 8) {
    return cost_of(DeviceAlgorithm::kReduceChunks, Collective::kAllReduce, 1024 * M, {ranks, blocks, 64, 64 * K}, link,
                   loads)
        .gb_s;
  };
  EXPECT_NEAR(rate(128, kNvlink), usable(kNvlink, 8) / 1e9, 2);
  EXPECT_LT(rate(128, {Kind::kPcie, 31.5, ""}), 31.5);
  EXPECT_NEAR(rate(8, kNvlink), 2 * rate(4, kNvlink), 1);
  EXPECT_LT(rate(8, kNvlink), rate(8, {Kind::kNvlink, 900, ""}) + 1e-9) << "blocks limit";
  EXPECT_GT(rate(8, kNvlink, 8, 2), 1.2 * rate(8, kNvlink, 1, 2)) << "two ranks leave loads idle";
  EXPECT_NEAR(usable(kOneGpu, 8) * 8, usable(kOneGpu, 2) * 2, 1) << "ranks share the memory of their GPU";
}

}  // namespace
}  // namespace nvx::test
