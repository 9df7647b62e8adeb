#include "schedule/catalog.h"

#include "schedule/exchanges.h"
#include "schedule/halving_doubling.h"
#include "schedule/reduce_gather.h"
#include "schedule/ring.h"
#include "schedule/scatter_all_gather.h"
#include "schedule/tree.h"

namespace nvx::schedule {
namespace {

template <class S>
constexpr Row row(Collective collective, const char* name) {
  return {collective, name, S::steps, S::at, S::scratch, S::legal, {.order = S::kOrder, .depth = S::depth}};
}

constexpr Row kCatalog[] = {
    row<PairAllReduce>(Collective::kAllReduce, "pair"),
    row<RecursiveDoublingAllReduce>(Collective::kAllReduce, "recursive_doubling"),
    row<HalvingDoublingAllReduce>(Collective::kAllReduce, "halving_doubling"),
    row<RingAllReduce>(Collective::kAllReduce, "ring"),
    row<HalvingReduceScatter>(Collective::kReduceScatter, "halving"),
    row<RingReduceScatter>(Collective::kReduceScatter, "ring"),
    row<DirectAllGather>(Collective::kAllGather, "direct"),
    row<BruckAllGather>(Collective::kAllGather, "bruck"),
    row<RingAllGather>(Collective::kAllGather, "ring"),
    row<BinomialBroadcast>(Collective::kBroadcast, "binomial"),
    row<ChainBroadcast>(Collective::kBroadcast, "chain"),
    row<ScatterAllGatherBroadcast>(Collective::kBroadcast, "scatter_all_gather"),
    row<BinomialReduce>(Collective::kReduce, "binomial"),
    row<ChainReduce>(Collective::kReduce, "chain"),
    row<HalvingGatherReduce>(Collective::kReduce, "halving_gather"),
    row<RingGatherReduce>(Collective::kReduce, "ring_gather"),
    row<LinearGather>(Collective::kGather, "linear"),
    row<LinearScatter>(Collective::kScatter, "linear"),
    row<PairwiseAllToAll>(Collective::kAllToAll, "pairwise"),
    row<DisseminationBarrier>(Collective::kBarrier, "dissemination"),
};

}  // namespace

std::span<const Row> catalog() { return kCatalog; }

const Row* find(Collective collective, std::string_view name) {
  for (const Row& r : kCatalog) {
    if (r.collective == collective && r.name == name) return &r;
  }
  return nullptr;
}

}  // namespace nvx::schedule
