// The grid of workers, live.
import { follow } from 'live'
import { mergeRows } from 'rows'
import { still } from 'still'

/** @type {Found|null} */
const grid = document.querySelector('[data-grid]')
if (grid) follow('/api/v1/workers/live', grid.dataset.cursor ?? '', (news) => still(() => mergeRows(grid, news)))
