// SPDX-License-Identifier: Apache-2.0
#pragma once

namespace fk::nccl {
class Channel;
}
