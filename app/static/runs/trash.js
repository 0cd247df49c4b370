// The trash: its rows are selected as the list's are.
import { createSelection, refetchRows } from 'selection'

const list = document.querySelector('[data-list]')
if (list) {
  const refresh = createSelection(list, async () => {
    await refetchRows(list.querySelector('[data-rows]'))
    refresh()
  })
}
